"""What a run may not change while it goes on exactly: objective, data, seed, reference, tokenizer, dtype, optimizer.

Each checkpoint holds them by name (`identity.json`). A resume compares those names that both sides know, and refuses
by name and with both values; a warm start (`learner.start_from`) takes the weights alone and may change all of them.
Nothing here imports torch, so that a mistake is told before any process starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from slipstream.checkpoint.files import MARKER, step_of
from slipstream.config.rules import objective_of
from slipstream.config.schema import Config
from slipstream.errors import UserError

IDENTITY = "identity.json"
NO_REFERENCE = "none"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def settings_of(config: Config) -> dict[str, Any]:
    """The part of a run's identity that stands in its config: plain values by setting."""
    objective = dataclasses.asdict(objective_of(config))
    objective["temperature"] = objective["temperature"] or config.sampling.temperature
    precision = config.learner.precision
    own = {
        "run.seed": config.run.seed,
        "learner.precision.master": precision.master or config.model.dtype,
        "learner.precision.transfer": precision.transfer or config.model.dtype,
        "learner.freeze": sorted(config.learner.freeze),
        "learner.optimizer.kind": config.learner.optimizer.kind,
        **config.learner.lora.identity(),
    }
    plain: dict[str, Any] = json.loads(
        json.dumps(own | {f"objective.{name}": value for name, value in objective.items()})
    )
    return plain


def identity_of(config: Config, data: str, model: Path, reference: str = NO_REFERENCE) -> dict[str, Any]:
    """The whole identity.

    Args:
        config: The run's config.
        data: Fingerprint of its prompts.
        model: Folder of the model; its tokenizer counts, its weights do not, for a checkpoint brings its own.
        reference: Digest of the reference model's content.
    """
    contents = {"data set": data, "reference model": reference, "tokenizer": tokenizer_digest(model)}
    return settings_of(config) | contents


def tokenizer_digest(model: Path) -> str:
    """Digest of the files that make a model folder's tokenizer and chat template."""
    digest = xxhash.xxh3_128()
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            digest.update(f"{name}\n".encode())
            digest.update((model / name).read_bytes())
    return digest.hexdigest()


def refuse_changed(checkpoint: Path, identity: Mapping[str, Any]) -> None:
    """See that a run which goes on from a checkpoint is the one that wrote it.

    Raises:
        UserError: It is not; names everything that changed, with both values.
    """
    try:
        saved = json.loads((checkpoint / IDENTITY).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # an older checkpoint, or one that its digest will show as damaged
        return
    changed = [
        f"{name} is {identity[name]!r} and was {saved[name]!r}"
        for name in sorted(saved.keys() & identity.keys())
        if saved[name] != identity[name]
    ]
    if changed:
        raise UserError(
            f"the run cannot go on from {checkpoint.name}: {'; '.join(changed)}",
            "set it back; or begin a new run with these weights: run.name=NEW "
            f"learner.start_from={checkpoint.parent.parent}",
        )


def refuse_changed_since(checkpoints: Path, identity: Mapping[str, Any]) -> None:
    """The same for the newest checkpoint of a run that has one, before it is read as a whole.

    Raises:
        UserError: As `refuse_changed`.
    """
    sealed = [path for path in checkpoints.glob(f"step-*/{MARKER}") if step_of(path.parent) is not None]
    if sealed:
        refuse_changed(max(sealed).parent, identity)
