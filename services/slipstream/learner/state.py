"""The trainer's state as files of a checkpoint: safetensors and JSON, nothing that can run code.

`model.safetensors` holds the weights by Hugging Face name, `trainer.safetensors` the optimizer's moments
(`optimizer/<parameter>:<moment>`) and the random states (`rng/<device>`), `trainer.json` the counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import RunHalted, UserError
from slipstream.learner.model import Policy
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.sharding import fill, whole

MODEL, TRAINER, COUNTS = "model.safetensors", "trainer.safetensors", "trainer.json"
SCHEMA = 1


class Stateful(Protocol):
    """What of a trainer is saved."""

    policy: Policy
    optimizer: Optimizer
    nonfinite: int
    nonfinite_in_a_row: int


def writers(trainer: Stateful) -> dict[str, Callable[[Path], None]]:
    """For each file name a function that writes it, from copies in host memory: training may go on meanwhile.

    Raises (when called):
        RunHalted: A tensor is not finite, so that nothing can continue from it.
    """
    model, parts = _copied(trainer.policy.tensors()), _copied(_moving_parts(trainer))
    counts = json.dumps(_counts(trainer), indent=2) + "\n"
    return {
        MODEL: lambda path: _save(model, path, {"format": "pt"}),
        TRAINER: lambda path: _save(parts, path),
        COUNTS: lambda path: _write(path, counts),
    }


def load(trainer: Stateful, folder: Path) -> None:
    """Overwrite the trainer's state by that of a checkpoint.

    Raises:
        UserError: A file is missing or unreadable, or the checkpoint is of another model.
    """
    try:
        counts = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
        weights, parts = load_file(folder / MODEL), load_file(folder / TRAINER)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: {error}", "resume from another one") from error
    if counts.get("schema") != SCHEMA:
        raise UserError(
            f"checkpoint {folder} has schema {counts.get('schema')}, this version reads {SCHEMA}",
            "resume with the version that wrote it",
        )
    moments = _below(parts, "optimizer/")
    _check_same(trainer.policy.tensors(), weights, folder)
    _check_same(trainer.optimizer.state(), moments, folder)
    for name, value in trainer.policy.tensors().items():
        fill(value, weights[name])
    trainer.optimizer.load_state(moments, counts["updates"])
    trainer.nonfinite, trainer.nonfinite_in_a_row = counts["nonfinite"], counts["nonfinite_in_a_row"]
    _restore_random(_below(parts, "rng/"))


def load_weights(trainer: Stateful, folder: Path) -> None:
    """Overwrite the weights by those of a checkpoint, and leave all else.

    Raises:
        UserError: As `load`.
    """
    try:
        weights = load_file(folder / MODEL)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: {error}", "start from another one") from error
    _check_same(trainer.policy.tensors(), weights, folder)
    for name, value in trainer.policy.tensors().items():
        fill(value, weights[name])


def _moving_parts(trainer: Stateful) -> dict[str, Tensor]:
    parts = {f"optimizer/{name}": value for name, value in trainer.optimizer.state().items()}
    parts["rng/cpu"] = torch.get_rng_state()
    if trainer.policy.device.type == "cuda":
        parts["rng/cuda"] = torch.cuda.get_rng_state(trainer.policy.device)
    return parts


def _restore_random(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _check_same(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path) -> None:
    """Nothing is overwritten before all names and shapes are known to fit."""
    different = sorted(
        set(own) ^ set(saved) | {n for n in set(own) & set(saved) if own[n].shape != saved[n].shape}
    )
    if different:
        raise UserError(
            f"checkpoint {folder} is of another model: {len(different)} tensors differ, as {different[0]}",
            "set model.source to the model that it was made from",
        )


def _counts(trainer: Stateful) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "updates": trainer.optimizer.updates,
        "nonfinite": trainer.nonfinite,
        "nonfinite_in_a_row": trainer.nonfinite_in_a_row,
    }


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RunHalted(
                f"tensor {name} is not finite, so no checkpoint is written; the newest one is from before"
            )
    save_file(tensors, path, metadata=metadata)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: whole(value.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
