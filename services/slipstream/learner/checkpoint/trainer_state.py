"""The trainer's state as files of a checkpoint: safetensors and JSON, nothing that can run code.

`model*.safetensors` holds the weights by Hugging Face name, `trainer*.safetensors` the optimizer's moments
(`optimizer/<parameter>:<moment>`) and each rank's random states (`rng/<device>`), one file for each rank (`shards`);
`trainer.json` holds the counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.learner.checkpoint.save_together import CommonSave, PartSave, Writer
from slipstream.learner.model.model import Policy
from slipstream.learner.model.tensor_shards import RankFile, Saved, file_name
from slipstream.learner.optimizer.governing import Governor
from slipstream.learner.optimizer.optimizer import Optimizer
from slipstream.learner.ranks.ranks import Ranks
from slipstream.models.tensors import FLOATS

MODEL, TRAINER, COUNTS = "model", "trainer", "trainer.json"
OPTIMIZER_FILES = f"{TRAINER}*.safetensors"
SCHEMA = 1


class Stateful(Protocol):
    """What of a trainer is saved."""

    policy: Policy
    optimizer: Optimizer
    nonfinite: int
    nonfinite_in_a_row: int
    governor: Governor


def writers(trainer: Stateful, ranks: Ranks) -> dict[str, Writer]:
    """For each of this rank's files a function that writes it, from copies in host memory: training may go on.

    Raises (when called):
        RunHalted: A tensor is not finite, so that nothing can continue from it.
    """
    model = RankFile.of(trainer.policy.tensors(), ranks.leads, ranks.first_copy)
    moments = {f"optimizer/{name}": value for name, value in trainer.optimizer.state().items()}
    rest = RankFile.of(moments, ranks.leads, ranks.first_copy)
    rest.tensors.update(_random_states(trainer.policy.device))
    counts = json.dumps(_counts(trainer), indent=2) + "\n"
    own: dict[str, Writer] = {
        file_name(MODEL, ranks.rank, ranks.size): model.save,
        file_name(TRAINER, ranks.rank, ranks.size): rest.save,
    }
    return own | ({COUNTS: lambda path: _write(path, counts)} if ranks.leads else {})


class Saves:
    """The saves of one rank, counted alike on all of them."""

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        """Args:
        ranks: This process's place.
        seconds: Deadline for the others' parts.
        """
        self._ranks = ranks
        self._seconds = seconds
        self._part: PartSave | None = None

    def writers(self, trainer: Stateful) -> dict[str, Writer]:
        """Rank 0: a writer for every file of the checkpoint, its own first, which has the others begin; none on the
        others, whose threads write."""
        own, ranks = writers(trainer, self._ranks), self._ranks
        if ranks.size == 1:
            return own
        number = ranks.next_save()
        if not ranks.leads:
            self.drop(self._seconds)
            self._part = PartSave(ranks, number, own)
            return {}
        common = CommonSave(ranks, number, self._seconds)
        others = {
            file_name(stem, r, ranks.size): common.of(r) for r in ranks.others for stem in (MODEL, TRAINER)
        }
        return {name: common.own(writer) for name, writer in own.items()} | others

    def drop(self, seconds: float = 0.0) -> None:
        """Others than rank 0: nobody asks for the latest part any more."""
        if self._part is not None:
            self._part.drop(seconds)
            self._part = None


def load(trainer: Stateful, folder: Path, ranks: Ranks) -> None:
    """Overwrite the trainer's state by that of a checkpoint, whichever number of ranks wrote it.

    Raises:
        UserError: A file is missing or unreadable, the checkpoint is of another model, or its optimizer is gone.
    """
    counts = _read_counts(folder)
    if weights_only(folder):
        raise UserError(
            f"checkpoint {folder} has weights and no optimizer (learner.checkpoint.keep_optimizer_last)",
            "an exact resume needs a newer one; a new run may take it as learner.start_from",
        )
    weights, rest = Saved(folder, MODEL), Saved(folder, TRAINER, "rng/")
    moments = {f"optimizer/{name}": value for name, value in trainer.optimizer.state().items()}
    _check_same(trainer.policy.tensors(), weights, folder)
    _check_same(moments, rest, folder)
    for name, value in trainer.policy.tensors().items():
        weights.fill(name, value)
    for name, value in moments.items():
        rest.fill(name, value)
    trainer.optimizer.resume(counts["updates"], counts.get("clock"))
    trainer.nonfinite, trainer.nonfinite_in_a_row = counts["nonfinite"], counts["nonfinite_in_a_row"]
    trainer.governor.restore(counts.get("age_bound"))
    _restore_random(rest.of_rank(ranks.rank))


def weights_only(folder: Path) -> bool:
    """Whether a checkpoint's optimizer was taken out of it."""
    return any(folder.glob(f"{MODEL}*.safetensors")) and not any(folder.glob(OPTIMIZER_FILES))


def load_weights(trainer: Stateful, folder: Path) -> None:
    """Overwrite the weights by those of a checkpoint, and leave all else.

    Raises:
        UserError: As `load`.
    """
    weights = Saved(folder, MODEL)
    _check_same(trainer.policy.tensors(), weights, folder)
    for name, value in trainer.policy.tensors().items():
        weights.fill(name, value)


def _read_counts(folder: Path) -> dict[str, Any]:
    try:
        counts: dict[str, Any] = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: {error}", "resume from another one") from error
    if counts.get("schema") != SCHEMA:
        raise UserError(
            f"checkpoint {folder} has schema {counts.get('schema')}, this version reads {SCHEMA}",
            "resume with the version that wrote it",
        )
    return counts


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _check_same(own: Mapping[str, Tensor], saved: Saved, folder: Path) -> None:
    """Nothing is overwritten before all names, shapes and kinds of number are known to fit."""
    shapes = saved.shapes
    shared = own.keys() & shapes.keys()
    different = sorted(own.keys() ^ shapes.keys() | {n for n in shared if tuple(own[n].shape) != shapes[n]})
    if different:
        raise UserError(
            f"checkpoint {folder} is of another model: {len(different)} tensors differ, as {different[0]}",
            "set model.source and learner.lora to what it was made with",
        )
    found = {n: saved.dtypes[n] for n in own if own[n].is_floating_point() and saved.dtypes[n] not in FLOATS}
    if found:
        first = min(found)
        raise UserError(
            f"checkpoint {folder}: {len(found)} tensors are no floats, as {first} of type {found[first]}",
            "take another checkpoint",
        )


def _counts(trainer: Stateful) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "updates": trainer.optimizer.updates,
        "clock": trainer.optimizer.clock,
        "nonfinite": trainer.nonfinite,
        "nonfinite_in_a_row": trainer.nonfinite_in_a_row,
        "age_bound": trainer.governor.bound,
    }


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
