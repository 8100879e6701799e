"""Which model the KL is measured to, and the digest of its content by which a resume knows it again.

Nothing here loads a model, so that a mistake is told before any is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.checkpoint.finding import entries
from slipstream.learner.checkpoint.identity import NO_REFERENCE
from slipstream.learner.checkpoint.lora_checkpoint import FILE as ADAPTER
from slipstream.learner.checkpoint.start import start_checkpoint
from slipstream.models.architecture import read_architecture, vocabulary
from slipstream.models.resolve import resolve
from slipstream.models.tensors import content_digest, read_tensors, tensor_shapes

START = "start"
_PASSING = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


@dataclass(frozen=True)
class ReferenceSource:
    """Where the reference's weights come from.

    Attributes:
        folder: A Hugging Face folder.
        start: A checkpoint whose weights go on top, where the run begins with one (`learner.start_from`).
        own: Whether the folder is that of the policy.
    """

    folder: Path
    start: Path | None
    own: bool

    def digest(self) -> str:
        """Digest of what makes the model: its tensors, by name, and its config, but for names and versions."""
        digest = xxhash.xxh3_128()
        digest.update(content_digest(read_tensors(self.folder, tensor_shapes(self.folder))).encode())
        config = {name: value for name, value in read_architecture(self.folder).items() if name not in _PASSING}
        digest.update(json.dumps(config, sort_keys=True).encode())
        if self.start is not None:
            # of its files those that are the weights: the others may be taken out of it later (`thin`)
            for name, entry in entries(self.start, "model*.safetensors", ADAPTER).items():
                digest.update(f"{name} {entry.bytes} {entry.xxh3_128}\n".encode())
        return digest.hexdigest()


def find_reference(config: Config, model: Path) -> ReferenceSource | None:
    """The reference that a config names, or None where it has none.

    Args:
        config: The whole config.
        model: Folder of the policy.

    Raises:
        UserError: It is not there, or its tokens are not the policy's.
    """
    source, start = config.learner.reference.source, config.learner.start_from
    if source is None:
        return None
    if source == START:
        return ReferenceSource(model, None if start is None else start_checkpoint(start), True)
    try:
        folder = resolve(source)
    except UserError as error:
        raise UserError(f"learner.reference.source: {error.problem}", error.mend) from None
    check_vocabulary(config, folder, model)
    return ReferenceSource(folder, None, folder.resolve() == model.resolve())


def check_vocabulary(config: Config, folder: Path, model: Path) -> None:
    """Refuse a reference whose tokens are not the policy's.

    Args:
        config: The whole config.
        folder: Folder of the reference.
        model: Folder of the policy.

    Raises:
        UserError: Vocabulary or tokens differ.
    """
    if _differ(_words(folder), _words(model)) or _differ(_tokens(folder), _tokens(model)):
        raise UserError(
            f"learner.reference.source {config.learner.reference.source!r}: its vocabulary is not that of "
            f"model.source {config.model.source!r}, so its logprobs would be those of other tokens",
            "name a model with the same tokenizer",
        )


def reference_digest(config: Config, model: Path) -> str:
    """The reference's entry in a run's identity."""
    source = find_reference(config, model)
    return NO_REFERENCE if source is None else source.digest()


def _differ(theirs: object, ours: object) -> bool:
    """Whether both are known and not the same."""
    return theirs is not None and ours is not None and theirs != ours


def _words(folder: Path) -> int | None:
    return vocabulary(read_architecture(folder))


def _tokens(folder: Path) -> Mapping[str, int] | None:
    """Ids of the tokenizer's tokens, where it has the file that says so."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    found: Mapping[str, int] | None = tokenizer.get("model", {}).get("vocab")
    return found
