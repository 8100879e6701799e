"""How a question is written as the text that the model reads; the only place where a template is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.conversation import Message
from slipstream.prompts.raw_rows import Row
from slipstream.prompts.source_spec import DataSpec
from slipstream.run.tokens import Tokenizer
from slipstream.text import repair

_OURS = {
    "messages",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_dict",
}
NAMED = ("chat", "chatml_no_system", "plain")


class Template:
    """The template of one set of prompts; without a tokenizer it can check rows, and not render all of them.

    Raises:
        UserError: Neither a named template nor a format string, or a system turn that it has no place for.
    """

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer | None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._custom = spec.template not in NAMED
        if self._custom and "{" not in spec.template:
            raise UserError(
                f"data.template: {spec.template!r}",
                f"use {', '.join(NAMED)} or a format string with {{prompt}}",
            )
        if taken := sorted(_OURS & set(spec.template_options)):
            raise UserError(f"data.template_options.{taken[0]}: is set by slipstream", "take it out")
        if spec.template == "chat" and tokenizer is not None:
            _refuse_unread(spec.template_options, tokenizer)
        placeless = spec.template == "plain" or (self._custom and "{system}" not in spec.template)
        if spec.system and placeless:
            raise UserError(
                "data.system: this template has no system turn", "use template chat, or drop system"
            )

    def check(self, row: Row, label: str) -> None:
        """See that a row fits, as far as no tokenizer is needed for it.

        Raises:
            UserError: As `render`, but for what a chat template refuses.
        """
        if self._spec.template == "chat":
            self._messages(row, label)
        else:
            self.render(row, label)

    def render(self, row: Row, label: str) -> str:
        """The prompt's text, up to where the model begins to write; marked where a row's text reads like a control
        token and is none (`Tokenizer.literal`).

        Raises:
            UserError: A format string names a column that the row lacks, or the template takes no messages.
        """
        messages = self._messages(row, label)
        go_on = messages[-1]["role"] == "assistant"
        if self._spec.template == "chat":
            assert self._tokenizer is not None
            try:
                return repair(self._tokenizer.chat(messages, self._spec.template_options, go_on))
            except UserError as error:
                raise UserError(f"{label}: {error.problem}", self._mend(error, row)) from error
        if self._spec.template == "chatml_no_system":
            turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
            text = "".join(turns)
            return text.removesuffix("<|im_end|>\n") if go_on else text + "<|im_start|>assistant\n"
        texts = [message["content"] for message in messages if message["role"] != "system"]
        if len(texts) != 1 or go_on or (isinstance(row.question, list) and len(row.question) != 1):
            raise UserError(
                f"{label}: {len(messages)} messages", "data.template: use chat for rows of messages"
            )
        if not self._custom:
            return str(texts[0])
        fields = {**self._marked(row.columns), "prompt": texts[0], "system": self._marked(self._spec.system)}
        return _fill("data.template", self._spec.template, fields, label)

    def _mend(self, error: UserError, row: Row) -> str:
        """The mend of what a chat template refuses; it cannot know that the system turn is not the row's."""
        own = isinstance(row.question, list) and row.question[0]["role"] == "system"
        if self._spec.system and not own and "chatml_no_system" in error.mend:
            return "leave data.system empty, or set data.template=chatml_no_system"
        return error.mend

    def _messages(self, row: Row, label: str) -> list[Message]:
        given = [{"role": "user", "content": row.question}] if isinstance(row.question, str) else row.question
        messages = [dict(message) for message in given]
        if self._spec.user_turn != "{prompt}":
            asked = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
            fields = {**row.columns, "prompt": asked["content"]}
            asked["content"] = _fill("data.user_turn", self._spec.user_turn, fields, label)
        if self._spec.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._spec.system})
        return [{**self._marked(message), "role": message["role"]} for message in messages]

    def _marked(self, value: Any) -> Any:
        if self._tokenizer is None or self._spec.control_tokens:
            return value
        return self._tokenizer.literal.mark(value)


def _refuse_unread(options: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    reads = tokenizer.template_variables
    if reads is None:
        return
    for name in options:
        if name not in reads:
            others = ", ".join(sorted(reads - _OURS)) or "nothing else"
            raise UserError(
                f"data.template_options.{name}: the chat template reads no variable of this name",
                f"take it out; it reads {others}",
            )


def _fill(setting: str, text: str, fields: Mapping[str, Any], label: str) -> str:
    try:
        return text.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        have = ", ".join(sorted(fields))
        raise UserError(
            f"{setting}: {text!r} does not fit {label} ({type(error).__name__}: {error})",
            f"its columns are {have}; double the braces that are meant literally",
        ) from error
