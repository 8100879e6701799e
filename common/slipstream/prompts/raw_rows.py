"""From a source's raw row to a question and its columns, in types that any message can carry."""

from __future__ import annotations

import datetime
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.conversation import Message, messages_of
from slipstream.prompts.source_spec import DataSpec
from slipstream.text import opened, repair

_INT64 = range(-(2**63), 2**63)
_NUMBER = re.compile(r"-?\d+")
_CONVERSATIONS = ("messages", "conversations")  # names under which a prompt goes, too


@dataclass(slots=True)
class Row:
    """A row as the rest of slipstream sees it.

    Attributes:
        question: What the row's prompt column says: one text, or chat messages.
        columns: All other columns, for rewards and format strings.
        repaired: Whether a lone surrogate had to be replaced.
        dropped: Whether turns of the assistant at the end were left out.
    """

    question: str | list[Message]
    columns: dict[str, Any]
    repaired: bool
    dropped: bool = False


def read_row(raw: Mapping[str, Any], spec: DataSpec, label: str) -> Row:
    """Apply the column mapping (a column then has both names), repair text and bring values to plain types.

    Raises:
        UserError: A mapped column is missing, there is no prompt, or a number is not finite; names the row.
    """
    repaired = False

    def plain(value: Any) -> Any:
        nonlocal repaired
        if isinstance(value, str):
            mended = repair(value)
            repaired |= mended != value
            return mended
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            # MessagePack ends at 64 bits; longer numbers travel as their digits.
            return value if value in _INT64 else str(value)
        if isinstance(value, Mapping):
            return {plain(str(key)): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        return plain(str(value))

    columns = plain(_typed(_mapped(raw, spec.columns, label), spec.types, label))
    _refuse_not_finite(columns, label)
    for name in _CONVERSATIONS:
        if "prompt" not in columns and name in columns:
            columns["prompt"] = columns.pop(name)
    if "prompt" not in columns:
        have = ", ".join(raw) or "none"
        raise UserError(f"{label}: no prompt; its columns are {have}", "map one: data.columns.prompt=NAME")
    asked = _question(columns.pop("prompt"), label)
    question = asked if spec.final_assistant == "prefill" else _without_answer(asked, label)
    if isinstance(question, list):
        columns["prompt"] = question  # rewards may ask for it as the row has it
    return Row(question, columns, repaired, dropped=len(question) < len(asked))


def question_key(question: str | list[Message]) -> int:
    """64-bit hash of the question alone, the same whatever its row's place, Unicode form and spaces."""
    text = question if isinstance(question, str) else json.dumps(question, sort_keys=True, ensure_ascii=False)
    canonical = " ".join(unicodedata.normalize("NFC", text).split())
    return int.from_bytes(blake2b(canonical.encode(), digest_size=8).digest(), "little")


def _mapped(raw: Mapping[str, Any], mapping: Mapping[str, str], label: str) -> dict[str, Any]:
    # both names stay, so that a reward may read a column by the one that its author knew
    return {**raw, **{ours: _reached(raw, ours, theirs, label) for ours, theirs in mapping.items()}}


def _typed(columns: dict[str, Any], types: Mapping[str, str], label: str) -> dict[str, Any]:
    for name, kind in types.items():
        text = columns.get(name)
        if not isinstance(text, str):
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if value is text or (
            kind == "number" and (isinstance(value, bool) or not isinstance(value, int | float))
        ):
            raise UserError(
                f"{label}: data.types.{name}={kind}, but it holds {text[:40]!r}", "mend it, or leave it a text"
            )
        columns[name] = value
    return columns


def _reached(raw: Mapping[str, Any], ours: str, theirs: str, label: str) -> Any:
    """A column by its name, or what lies inside one: `reward_model.ground_truth`, `messages.-1.content`."""
    if theirs in raw:
        return raw[theirs]
    value: Any = raw
    for depth, key in enumerate(steps := theirs.split(".")):
        value = opened(value)
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif (
            isinstance(value, list | tuple) and _NUMBER.fullmatch(key) and -len(value) <= int(key) < len(value)
        ):
            value = value[int(key)]
        else:
            place = f"{'.'.join(steps[:depth])!r} holds" if depth else "its columns are"
            raise UserError(f"{label}: data.columns.{ours}={theirs}, but {place} {_told(value)}", "map another")
    return value


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "none"
    return f"{len(value)} items" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _refuse_not_finite(columns: Mapping[str, Any], label: str) -> None:
    """No reward can be a comparison with one, and few formats carry it."""
    for name, value in columns.items():
        if (number := _not_finite(value)) is not None:
            raise UserError(
                f"{label}: column {name!r} holds {number}, which is no finite number",
                "put a number, a text or null there, or remove the row",
            )


def _not_finite(value: Any) -> float | None:
    """The first number in a value, also deep in it, that is not finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for part in parts if (found := _not_finite(part)) is not None), None)


def _question(prompt: Any, label: str) -> str | list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"{label}: the prompt is empty", "give the row a prompt or remove it")
        held = opened(prompt) if prompt.lstrip().startswith("[") else prompt
        if not (isinstance(held, list) and held and all(_is_turn(each) for each in held)):
            return prompt
        prompt = held  # messages that were written down as JSON
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"{label}: the prompt is a {type(prompt).__name__}", "give a text or a list of chat messages"
        )
    return messages_of(prompt, label)


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _without_answer(question: str | list[Message], label: str) -> str | list[Message]:
    """The messages up to where the model's turn begins: data sets of dialogues end with the answer."""
    end = len(question)
    while isinstance(question, list) and end and question[end - 1]["role"] == "assistant":
        end -= 1
    if not end or (isinstance(question, list) and question[end - 1]["role"] == "system"):
        raise UserError(
            f"{label}: no message before the assistant's turn", "give the row a user's turn or remove it"
        )
    return question[:end]
