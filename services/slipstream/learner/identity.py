"""What a run may not change while it goes on exactly: objective, data, reward, seed, reference, tokenizer, dtype,
optimizer.

Each checkpoint holds them by name (`identity.json`). A resume compares those names that both sides know, and refuses
by name and with both values; a warm start (`learner.start_from`) takes the weights alone and may change all of them.
The reward may also change within a run, where `run.accept` names what does: the checkpoints that follow keep what was
changed, and from which step. Nothing here imports torch, so that a mistake is told before any process starts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from slipstream.checkpoint.files import MARKER, step_of
from slipstream.config.rules import may_be_accepted, objective_of
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rewards.source import source_digest

log = logging.getLogger("slipstream.learner")
IDENTITY = "identity.json"
ACCEPTED = "accepted changes"
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
    precision = config.learner.precision
    own = {
        "run.seed": config.run.seed,
        "sampling.temperature": config.sampling.temperature,
        "learner.precision.master": precision.master or config.model.dtype,
        "learner.precision.transfer": precision.transfer or config.model.dtype,
        "learner.freeze": sorted(config.learner.freeze),
        "learner.optimizer.kind": config.learner.optimizer.kind,
        **config.learner.lora.identity(),
        **_reward(config),
    }
    plain: dict[str, Any] = json.loads(
        json.dumps(own | {f"objective.{name}": value for name, value in objective.items()})
    )
    return plain


def _reward(config: Config) -> dict[str, Any]:
    """What the rewards are: names, and for each its source, weight and options; how long it may take is no part."""
    found: dict[str, Any] = {"reward.functions": [each.component for each in config.reward.functions]}
    for index, each in enumerate(config.reward.functions):
        own = each.model_dump(mode="json", exclude={"name", "timeout_seconds", "memory_mb"})
        digest = source_digest(each.use)
        own |= {} if digest is None else {"source": digest}
        found |= {f"reward.functions.{index}.{name}": value for name, value in own.items()}
    return found


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


def refuse_changed(
    checkpoint: Path, identity: Mapping[str, Any], accepted: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """See that a run which goes on from a checkpoint is the one that wrote it.

    Args:
        checkpoint: Its folder.
        identity: The run's, as it would go on.
        accepted: Names of what may have changed (`run.accept`).

    Returns:
        Every change that was ever accepted, with both values and the step from which it counts; for the checkpoints
        that follow (`ACCEPTED`).

    Raises:
        UserError: It is not; names everything that changed, with both values.
    """
    try:
        saved = json.loads((checkpoint / IDENTITY).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # an older checkpoint, or one that its digest will show as damaged
        return []
    changed = [
        name for name in sorted((saved.keys() & identity.keys()) - {ACCEPTED}) if saved[name] != identity[name]
    ]
    refused = [name for name in changed if name not in accepted]
    if refused:
        told = "; ".join(f"{name} is {identity[name]!r} and was {saved[name]!r}" for name in refused)
        raise UserError(
            f"the run cannot go on from {checkpoint.name}: {told}", _mend(checkpoint, changed, refused)
        )
    taken = [
        {"after step": step_of(checkpoint), "name": name, "was": saved[name], "is": identity[name]}
        for name in changed
    ]
    return [*saved.get(ACCEPTED, []), *taken]


def _mend(checkpoint: Path, changed: Sequence[str], refused: Sequence[str]) -> str:
    mend = (
        "set it back; or begin a new run with these weights: run.name=NEW "
        f"learner.start_from={checkpoint.parent.parent}"
    )
    if all(may_be_accepted(name) for name in refused):
        mend += f"; or go on with the change in this run: run.accept='[{', '.join(changed)}]'"
    return mend


def tell_accepted(changes: Sequence[Mapping[str, Any]], step: int) -> None:
    """Say what has changed in a run since a checkpoint and was accepted."""
    for change in changes:
        if change["after step"] == step:
            log.warning(
                "%s is %r from here on and was %r (run.accept)", change["name"], change["is"], change["was"]
            )


def refuse_changed_since(checkpoints: Path, identity: Mapping[str, Any], accepted: Sequence[str] = ()) -> None:
    """The same for the newest checkpoint of a run that has one, before it is read as a whole.

    Raises:
        UserError: As `refuse_changed`.
    """
    sealed = [path for path in checkpoints.glob(f"step-*/{MARKER}") if step_of(path.parent) is not None]
    if sealed:
        refuse_changed(max(sealed).parent, identity, accepted)
