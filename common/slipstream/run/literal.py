"""Text that holds the texts of control tokens, such as `<|im_end|>`, and shall be read as text.

While a prompt is rendered such places are marked, so that the template's own control tokens can be told from them.
To encode it, the template's get other names, under which a copy of the tokenizer knows them: all else is then text,
and the ids are those that the tokenizer gives to any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from slipstream.errors import UserError

# Code points that Unicode keeps from being characters; a text that holds them all the same is marked too.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


def is_marked(text: str) -> bool:
    """Whether a rendered text has places that are marked."""
    return _OPEN in text


class Literal:
    """Marks and encodes for one tokenizer.

    Args:
        hf: A `transformers` tokenizer.
        stop_ids: Ids that end a completion: control tokens, whatever the tokenizer says of them.
    """

    def __init__(self, hf: Any, stop_ids: tuple[int, ...]) -> None:
        self._hf = hf
        known = hf.added_tokens_decoder.items()
        self._ids = {str(t.content): int(i) for i, t in known if t.special or int(i) in stop_ids}
        self._texts = [_OPEN, *sorted(self._ids, key=lambda text: (-len(text), text))]
        self._found = re.compile("|".join(map(re.escape, self._texts)))

    def mark(self, value: Any) -> Any:
        """The value, with what reads like a control token marked in its texts, also deep in it."""
        if isinstance(value, str):
            return self._found.sub(lambda hit: f"{_OPEN}{self._texts.index(hit[0])}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def unmark(self, text: str) -> str:
        """The text as its author wrote it."""
        return _MARK.sub(lambda hit: self._texts[int(hit[1])], text)

    def encode(self, text: str) -> list[int]:
        """Ids of a marked text: what is marked is text, every other control token is one.

        Raises:
            UserError: This tokenizer cannot tell the two apart.
        """
        pieces = [self.unmark(piece) for piece in self._renamed(text)]
        ids = self._copy.encode("".join(pieces), add_special_tokens=False).ids
        return list(map(int, ids))

    def _renamed(self, text: str) -> list[str]:
        """The text in pieces, its unmarked control tokens under their other names."""
        renamed = [
            self._found.sub(lambda hit: _name(self._ids[hit[0]]), part) for part in _MARK.split(text)[::2]
        ]
        marks = [f"{_OPEN}{number}{_CLOSE}" for number in _MARK.findall(text)]
        return [piece for pair in zip(renamed, [*marks, ""], strict=True) for piece in pair]

    @cached_property
    def _copy(self) -> Any:
        from tokenizers import Tokenizer

        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise self._refusal("it is none of the tokenizers library")
        copy = Tokenizer.from_str(json.dumps(self._other_names(json.loads(backend.to_str()))))
        if wrong := [text for text, number in self._ids.items() if copy.token_to_id(_name(number)) != number]:
            raise self._refusal(f"{wrong[0]} cannot be renamed")
        return copy

    def _other_names(self, core: dict[str, Any]) -> dict[str, Any]:
        core |= {"post_processor": None, "padding": None, "truncation": None}
        model = core["model"]
        for token in core["added_tokens"]:
            token["content"] = self._other(token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._other(text): number for text, number in model["vocab"].items()}
            model["vocab"] |= {_name(number): number for number in self._ids.values()}
            merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model.get("merges", ())]
            model["merges"] = [pair for pair in merges if not {*pair, "".join(pair)} & set(self._ids)]
        else:
            model["vocab"] = [[self._other(text), score] for text, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = self._other(model["unk_token"])
        return core

    def _other(self, text: str) -> str:
        return _name(self._ids[text]) if text in self._ids else text

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"data: a row holds the text of a control token, which this tokenizer cannot read as text ({reason})",
            "take it out of the row, or let it be a control token: data.control_tokens=true",
        )


def _name(number: int) -> str:
    """Characters for private use, which no template writes."""
    return f"\ue0f0{number}\ue0f1"
