"""`slipstream replay`: make a recorded run's steps again, and compare the weights bit for bit.

An asynchronous run is not repeatable by its seed, for which group comes into which step depends on when processes
run. But given the groups of each step it is arithmetic alone, and on the same machine that gives the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.load import load_recorded
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.checkpoint.finding import complete
from slipstream.learner.checkpoint.start import start_checkpoint
from slipstream.learner.replay import recording
from slipstream.learner.step.trainer import Trainer
from slipstream.models.resolve import resolve
from slipstream.run.folder import RunFolder, line_of_descent, read_lines


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What a replay found: the steps it made again, and the first one whose weights differ (None: all are equal)."""

    first: int
    last: int
    differs: int | None = None
    recorded: str = ""
    recomputed: str = ""


def replay(folder: RunFolder, after: int | None = None, tell: Callable[[str], None] = print) -> ReplayOutcome:
    """Make the recorded steps again, from the initial weights or from a checkpoint.

    Args:
        folder: A run that was trained with `run.record`.
        after: Begin with the checkpoint of this step; by default as early as the record allows.
        tell: Told where it begins.

    Raises:
        UserError: No record, a step's record that is missing or was changed, a step that several ranks or a GPU
            made, or a config that is not there.
    """
    steps = _recorded_steps(folder)
    configs = {recording.terms_digest(config): config for config in _configs(folder)}
    begin, checkpoint = _beginning(folder, steps, after)
    tell(f"from {checkpoint.name if checkpoint else 'the initial weights'}")
    trainer: Trainer | None = None
    terms = ""
    for line in (step for step in steps if step["step"] > begin):
        number = line["step"]
        recorded = recording.read(folder, number, line["record"])
        if recorded.place != recording.ONE_CPU:
            raise UserError(
                f"step {number} was trained by {recorded.place}, whose sums are made in another order",
                "only what one rank on a CPU trained is the same to the bit when it is made again",
            )
        if trainer is None or recorded.terms != terms:
            terms = recorded.terms
            trainer = _trainer(configs, terms, number, trainer or checkpoint)
        trainer.step(recorded.batch(), recorded.before, recorded.lost)
        found = recording.weights_digest(trainer.tensors())
        if found != line["weights"]:
            return ReplayOutcome(begin + 1, number, number, line["weights"], found)
    return ReplayOutcome(begin + 1, steps[-1]["step"])


def _recorded_steps(folder: RunFolder) -> list[dict[str, Any]]:
    """The steps after the last one without a record; a run may have begun to record late."""
    steps = line_of_descent(read_lines(folder.steps))
    without = [index for index, step in enumerate(steps) if "record" not in step]
    recorded = steps[without[-1] + 1 :] if without else steps
    if not recorded:
        raise UserError(f"{folder.path}: its last step has no record", "train with run.record=true")
    return recorded


def _beginning(folder: RunFolder, steps: list[dict[str, Any]], after: int | None) -> tuple[int, Path | None]:
    """The step to begin after, and its checkpoint; 0 and None for the initial weights."""
    least = steps[0]["step"] - 1
    if least == 0 and not after:
        return 0, None
    last = steps[-1]["step"]
    found = {step: path for step, path in complete(folder.checkpoints) if least <= step < last}
    if not found or (after is not None and after not in found):
        asked = "" if after is None else f" of step {after}"
        kept = ", ".join(str(step) for step in found) or "none"
        raise UserError(
            f"{folder.path}: steps {least + 1} to {last} are recorded, and a replay needs a checkpoint{asked} "
            f"to begin from; there are: {kept}",
            "record from the first step on, or keep more (learner.checkpoint.keep_every)",
        )
    begin = min(found) if after is None else after
    return begin, found[begin]


def _configs(folder: RunFolder) -> list[Config]:
    """The config of every attempt at the run; a resume may have changed it."""
    files = [*sorted((folder.path / "attempts").glob("*/config.yaml")), folder.config]
    return [load_recorded(file)[0] for file in files if file.exists()]


def _trainer(configs: Mapping[str, Config], terms: str, step: int, before: Trainer | Path | None) -> Trainer:
    """A trainer under the terms of a step, with the state of the one before or of a checkpoint."""
    if terms not in configs:
        raise UserError(f"step {step}: no config of the run's attempts is the one that it was trained with")
    config = configs[terms]
    device = {"learner": config.learner.model_copy(update={"device": "cpu"})}
    trainer = Trainer(config.model_copy(update=device), resolve(config.model.source))
    if before is None and config.learner.start_from is not None:
        trainer.load_weights(start_checkpoint(config.learner.start_from))
    if isinstance(before, Path):
        trainer.load(before)
    elif before is not None:
        with tempfile.TemporaryDirectory(prefix="slipstream-replay-") as place:
            for name, write in before.save_writers().items():
                write(Path(place) / name)
            trainer.load(Path(place))
    return trainer
