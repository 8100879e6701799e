"""The one place where text becomes token ids and ids become text.

A prompt is encoded once, here, and its ids are what the generator and the learner both see. Exactly one BOS
token: the tokenizer's automatic special tokens are always off, and BOS is put in front only when this tokenizer
would add one by itself and the text (a chat template often does) does not bring it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.run.literal import Literal, is_marked
from slipstream.text import REPLACEMENT, repair

# What transformers adds to the language of chat templates.
_TRANSFORMERS_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_HELPERS = {"raise_exception", "strftime_now"}


class Tokenizer:
    """A Hugging Face tokenizer with slipstream's rules about special tokens.

    Args:
        hf: Any `transformers` tokenizer.
        stop_ids: Ids that end a completion; default is the tokenizer's eos token alone.
    """

    def __init__(self, hf: Any, stop_ids: Iterable[int] | None = None) -> None:
        self.hf = hf
        own = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(own if stop_ids is None else stop_ids)))
        probe = hf("a", add_special_tokens=True)["input_ids"]
        adds_bos = hf.bos_token_id is not None and probe[:1] == [hf.bos_token_id]
        self._bos: int | None = int(hf.bos_token_id) if adds_bos else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with exactly one BOS where this model wants one; nothing is cut off."""
        batch = self.hf(list(texts), add_special_tokens=False, truncation=False, padding=False, verbose=False)
        return [self._one_bos(list(ids)) for ids in batch["input_ids"]]

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, of texts in which `literal.mark` may have marked what is no control token though it reads so.

        Raises:
            UserError: This tokenizer cannot tell the two apart.
        """
        plain = iter(self.encode([text for text in texts if not is_marked(text)] or [""]))
        return [self._one_bos(self.literal.encode(text)) if is_marked(text) else next(plain) for text in texts]

    @cached_property
    def literal(self) -> Literal:
        """What tells texts of control tokens from the tokens themselves."""
        return Literal(self.hf, self.stop_ids)

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.hf.bos_token_id
        if bos is None:
            return ids
        leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        if leading > 1:
            return ids[leading - 1 :]
        return [bos, *ids] if self._bos is not None and leading == 0 else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids, always encodable as UTF-8: a cut character becomes U+FFFD, the ids stay as they are.

        Ids beyond the vocabulary (a model's embedding is often padded) become U+FFFD too.
        """
        size = len(self.hf)
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if 0 <= token < size:
                run.append(token)
                continue
            parts += [self._decode_known(run, skip_special), REPLACEMENT]
            run = []
        parts.append(self._decode_known(run, skip_special))
        return repair("".join(parts))

    def _decode_known(self, ids: list[int], skip_special: bool) -> str:
        if not ids:
            return ""
        text = self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], go_on: bool = False
    ) -> str:
        """Text of the messages by the model's own chat template, ending where the assistant's turn begins.

        With `go_on` the last message is the beginning of that turn, and the text ends where it does.

        Raises:
            UserError: The tokenizer has no chat template, or the template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.hf.chat_template:
            raise UserError(
                "data.template: chat, but the tokenizer has no chat template",
                "set template to plain, chatml_no_system or a format string",
            )
        turns = [dict(message) for message in messages]
        try:
            text = self.hf.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=not go_on, continue_final_message=go_on, **options
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = {str(turn.get("role")) for turn in turns}
            mend = (
                "take the system turn out of the row, or set data.template=chatml_no_system"
                if "system" in roles and "system" in str(error).lower()
                else ""
            )
            raise UserError(f"data.template: the chat template refuses the messages ({error})", mend) from error
        return str(text)

    @cached_property
    def template_variables(self) -> frozenset[str] | None:
        """Names that the chat template asks for, beside those that every template has; None where nobody can say."""
        from jinja2 import Environment, TemplateError, meta

        if not isinstance(self.hf.chat_template, str):
            return None
        try:
            text = _TRANSFORMERS_TAG.sub("", self.hf.chat_template)
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except TemplateError:
            return None
        return frozenset(meta.find_undeclared_variables(parsed)) - _HELPERS - set(self.hf.special_tokens_map)

    @cached_property
    def identity(self) -> str:
        """Hex digest of everything that decides how text becomes ids, the chat template included."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        core: Any = sorted(self.hf.get_vocab().items())
        if backend is not None:
            core = json.loads(backend.to_str())
            # Padding and truncation are switched by whoever called last; they are no part of the identity.
            core.pop("padding", None)
            core.pop("truncation", None)
        facts = [type(self.hf).__name__ if backend is None else "", core, self.hf.chat_template]
        facts += [self.hf.bos_token_id, self.hf.eos_token_id, self.hf.pad_token_id, self._bos]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of a local model folder or a Hugging Face id, with the stop ids of its configs.

    Raises:
        UserError: There is no such folder or id, or it holds no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        if (Path(name) / "tokenizer.model").is_file() and not _installed("sentencepiece"):
            raise UserError(
                f"model.source: {name!r} has a SentencePiece tokenizer (tokenizer.model) and no tokenizer.json, and "
                "sentencepiece is not installed",
                "pip install 'slipstream[sentencepiece]'",
            ) from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"model.source: no tokenizer at {name!r} ({first})",
            "give a local model folder or a reachable model id",
        ) from error
    return Tokenizer(hf, stop_ids=_stop_ids(name, hf))


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _stop_ids(name: str, hf: Any) -> set[int]:
    """The tokenizer's eos, plus those of config.json and generation_config.json (where chat end tokens are)."""
    found = set() if hf.eos_token_id is None else {int(hf.eos_token_id)}
    for file in ("config.json", "generation_config.json"):
        eos = _read_json(name, file).get("eos_token_id")
        found.update(int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None)
    return found


def _read_json(name: str, file: str) -> dict[str, Any]:
    """A JSON file of a model folder or id; empty where the model has no such file."""
    if Path(name).is_dir():
        path: Path | None = Path(name) / file
    else:
        from transformers.utils import cached_file

        hit = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        path = Path(hit) if hit else None
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model.source: {path} is not JSON ({error})", "fetch the model again") from error
    return content if isinstance(content, dict) else {}
