"""What a set of prompts is made of: its source, how a row is read and written, and how long it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SourceKind = Literal["jsonl", "huggingface", "reasoning_gym", "arithmetic", "sort_digits", "gsm8k"]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """One source of prompts.

    Attributes:
        kind: Where rows come from.
        path: File, folder or Hugging Face datasets id (jsonl, huggingface, gsm8k).
        name: reasoning-gym's task, or the configuration of a datasets id.
        options: The task's own options, such as `{"terms": 2, "digits": 1}`.
        columns: Our column name -> the row's; names not given are taken as they are.
        types: Columns whose texts are read as `number` or as `json`.
        user_turn: Format string over the row's columns for the user's turn; doubled braces are literal.
        template: `chat` (the tokenizer's), `chatml_no_system`, `plain`, or a format string that holds
            `{prompt}` (the user's turn) or other columns.
        template_options: Extra variables of the chat template, such as `{"enable_thinking": False}`.
        system: System turn put in front of rows that bring none; empty for none.
        final_assistant: Of a row whose messages end with the assistant's turn: `drop` that turn, or `prefill`, which
            lets the completion go on from it.
        control_tokens: Read the texts of control tokens in rows as these; else they are text like any other.
        split: Split of a source of rows, or a slice of it.
        limit: Rows to generate, or to read from the start; None for all there are.
        eval_size: Distinct questions to hold out.
        seed: Seed of generated rows and of the hold-out.
        stream: Draw rows in their own order, without reading the source through.
    """

    kind: SourceKind
    path: str = ""
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    user_turn: str = "{prompt}"
    template: str = "chat"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    final_assistant: Literal["drop", "prefill"] = "drop"
    control_tokens: bool = False
    split: str = "train"
    limit: int | None = None
    eval_size: int = 0
    seed: int = 0
    stream: bool = False


@dataclass(frozen=True)
class LengthBudget:
    """Room for prompt and completion together, in tokens.

    Attributes:
        context: The most tokens the model may see.
        max_new_tokens: The most tokens of a completion.
        min_new_tokens: A prompt that leaves less room than this is refused.
        vocabulary: Ids that the model knows; a prompt with another is refused. None where it is not known.
    """

    context: int
    max_new_tokens: int
    min_new_tokens: int = 1
    vocabulary: int | None = None

    def room(self, prompt_tokens: int) -> int | None:
        """New tokens allowed after a prompt of this length, or None when the prompt must be refused."""
        room = min(self.max_new_tokens, self.context - prompt_tokens)
        return room if room >= max(1, self.min_new_tokens) else None

    def refusal(self, ids: Sequence[int]) -> str | None:
        """Why a prompt of these ids cannot be used, in the words of a report; an empty one cannot either."""
        if not ids or self.room(len(ids)) is None:
            return "as too long"
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            return f"for ids outside the model's vocabulary of {self.vocabulary}"
        return None
