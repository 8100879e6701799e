"""What a run may not change while it goes on exactly: objective, data, reward, seed, reference, tokenizer, dtype,
optimizer.

Each checkpoint holds them by name (`identity.json`). A resume compares those names that both sides know, and refuses
by name and with both values; a warm start (`learner.start_from`) takes the weights alone and may change all of them.
The reward and the build of slipstream may also change within a run, where `run.accept` names what does: the
checkpoints that follow keep what was changed, and from which step. Nothing here imports torch, so that a mistake is
told before any process starts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from slipstream.config.rules import may_be_accepted, objective_of
from slipstream.config.schema import Config
from slipstream.config.without_effect import condition_of, lookup
from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import MARKER, step_of
from slipstream.lifecycle.release import RELEASE
from slipstream.models.resolve import present
from slipstream.rewards.source import source_digest
from slipstream.run.provenance import release

log = logging.getLogger("slipstream.learner")
IDENTITY = "identity.json"
ACCEPTED = "accepted changes"
NO_REFERENCE = "none"
DESCRIBED = "described"
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
        **_data(config),
    }
    plain: dict[str, Any] = json.loads(
        json.dumps(own | {f"objective.{name}": value for name, value in objective.items()})
    )
    return plain


def _data(config: Config) -> dict[str, Any]:
    """The settings that make the training rows, but for the place of a file: its rows count, and they are compared
    by the learner (`prompts.known_rows`), for a file may grow under a run."""
    look = lookup(config, "data", {})
    fields = {n: f for n, f in type(config.data).model_fields.items() if n != "path" or not _is_file(config)}
    acting = [n for n, field in fields.items() if (c := condition_of(field)) is None or c.holds(look)]
    return {f"data.{name}": getattr(config.data, name) for name in acting}


def _is_file(config: Config) -> bool:
    return Path(config.data.path or ".").expanduser().exists()


def described(config: Config, prompts: int | None = None) -> dict[str, str]:
    """How a person would call what the identity holds digests of, by the same names; a change of words alone is none.

    Args:
        config: The run's config.
        prompts: How many prompts there are, where that is known.
    """
    data, path = config.data, Path(config.data.path).expanduser()
    size = f" ({path.stat().st_size:,} bytes)" if _is_file(config) else ""
    count = "" if prompts is None else f", {prompts:,} prompts"
    return {
        "data.path": f"{data.path}{size}",
        "data set": f"data.kind {data.kind} {data.path or data.name}".strip() + count,
        "reference model": f"learner.reference.source {config.learner.reference.source or 'null'}",
        "tokenizer": f"model.source {config.model.source}",
    }


def _reward(config: Config) -> dict[str, Any]:
    """What the rewards are: names, and for each its source, weight and options; how long it may take is no part."""
    found: dict[str, Any] = {"reward.functions": [each.component for each in config.reward.functions]}
    for index, each in enumerate(config.reward.functions):
        own = each.model_dump(mode="json", exclude={"name", "timeout_seconds", "memory_mb"})
        own["use"] = each.use.rpartition("/")[2]  # a file counts by its content, wherever it lies
        digest = source_digest(each.use)
        own |= {} if digest is None else {"source": digest}
        found |= {f"reward.functions.{index}.{name}": value for name, value in own.items()}
    return found


def identity_of(
    config: Config, data: str, model: Path, reference: str = NO_REFERENCE, prompts: int | None = None
) -> dict[str, Any]:
    """The whole identity.

    Args:
        config: The run's config.
        data: Fingerprint of its prompts.
        model: Folder of the model; its tokenizer counts, its weights do not, for a checkpoint brings its own.
        reference: Digest of the reference model's content.
        prompts: How many prompts there are, for messages.
    """
    contents = {"data set": data, "reference model": reference, "tokenizer": tokenizer_digest(model)}
    contents[RELEASE] = release()
    return settings_of(config) | contents | {DESCRIBED: described(config, prompts)}


def known_at_start(config: Config) -> dict[str, Any]:
    """The part of the identity that is known before any process starts, with its descriptions."""
    model = present(config.model.source)
    tokenizer = {} if model is None else {"tokenizer": tokenizer_digest(model)}
    return settings_of(config) | tokenizer | {RELEASE: release(), DESCRIBED: described(config)}


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
    changed = differing(saved, identity)
    refused = [name for name in changed if name not in accepted]
    if refused:
        raise UserError(
            f"the run cannot go on from {checkpoint.name}: {tell(saved, identity, refused)}",
            _mend(checkpoint, changed, refused),
        )
    taken = [
        {"after step": step_of(checkpoint), "name": name, "was": saved[name], "is": identity[name]}
        for name in changed
    ]
    return [*saved.get(ACCEPTED, []), *taken]


def differing(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Names of what both identities know and hold different values of."""
    known = sorted((saved.keys() & identity.keys()) - {ACCEPTED, DESCRIBED})
    return [name for name in known if saved[name] != identity[name]]


def tell(saved: Mapping[str, Any], identity: Mapping[str, Any], names: Sequence[str]) -> str:
    """Each of the names with both values, in words where the values are digests."""
    return "; ".join(_told(name, saved, identity) for name in names)


def _told(name: str, saved: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    now, before = identity.get(DESCRIBED, {}).get(name), saved.get(DESCRIBED, {}).get(name)
    if now is None:
        return f"{name} is {identity[name]!r} and was {saved[name]!r}"
    if before is None or now == before:
        return f"{name} ({now}) does not hold what it did"
    return f"{name} is {now} and was {before}"


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
