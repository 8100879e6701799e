"""Conversations in the shapes that data sets have them, as chat messages with role and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import UserError

Message = dict[str, Any]
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Whose turns may hold calls or results and no text.
_TEXTLESS = ("assistant", "tool")


def messages_of(turns: Sequence[Any], label: str) -> list[Message]:
    """Turns as messages: ShareGPT's `from` and `value` renamed, parts of type text joined, null as an empty text.

    What else a message holds, such as `tool_calls`, stays, unless it is null, as columnar files fill gaps.

    Raises:
        UserError: A turn without role and text, or with parts that are no text; names the row.
    """
    return [_message(turn, label) for turn in turns]


def _message(turn: Any, label: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _malformed(label)
    turn = dict(turn)
    if "role" not in turn and isinstance(turn.get("from"), str):
        source = turn.pop("from")
        if source not in _SHAREGPT:
            raise UserError(
                f"{label}: a turn from {source!r}", f"conversations hold turns from {', '.join(_SHAREGPT)}"
            )
        turn = {"role": _SHAREGPT[source], "content": turn.pop("value", None), **turn}
    role = turn.get("role")
    if not isinstance(role, str):
        raise _malformed(label)
    rest = {
        name: value for name, value in turn.items() if name not in ("role", "content") and value is not None
    }
    content = turn["content"] if "content" in turn else rest.pop("value", None)
    return {"role": role, "content": _text(content, role, label), **rest}


def _text(content: Any, role: str, label: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in _TEXTLESS:
        return ""
    if not isinstance(content, list):
        raise _malformed(label)
    content = [{"text": part} if isinstance(part, str) else part for part in content]
    if not all(isinstance(part, Mapping) for part in content):
        raise _malformed(label)
    for part in content:
        if part.get("type", "text") not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise UserError(
                f"{label}: a message with a part of type {part.get('type')!r}", "only text can be trained on"
            )
    return "".join(part["text"] for part in content)


def _malformed(label: str) -> UserError:
    return UserError(f"{label}: a message without role and text", 'write {"role": "user", "content": "…"}')
