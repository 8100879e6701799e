"""The learner's dtypes as torch has them, refused where the device lacks one."""

from __future__ import annotations

import torch

from slipstream.config.schema import Config
from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.services_config import LearnerSection
from slipstream.errors import UserError


def learner_model(config: Config) -> ModelSection:
    """`model` as the learner loads it: in the master dtype."""
    return config.model.model_copy(update={"dtype": config.learner.precision.master or config.model.dtype})


def transfer_dtype(config: Config) -> torch.dtype:
    """The dtype in which floating-point weights travel."""
    return _torch(config.learner.precision.transfer or config.model.dtype)


def autocast_dtype(learner: LearnerSection) -> torch.dtype | None:
    """The dtype that torch's autocast may use, None without it."""
    precision = learner.precision
    return _torch(precision.param) if precision.autocast and precision.param else None


def shard_dtypes(learner: LearnerSection) -> tuple[torch.dtype | None, torch.dtype]:
    """Of gathered weights (None keeps the master's), and of the sums over ranks."""
    precision = learner.precision
    param = None if precision.autocast or precision.param is None else _torch(precision.param)
    return param, _torch(precision.reduce)


def check_precision(config: Config, device: torch.device, alone: bool) -> None:
    """See that the device can do what the config asks of it, before a model is loaded.

    Args:
        config: The run's config.
        device: The learner's.
        alone: Whether this process trains without other ranks, hence without shards.

    Raises:
        UserError: A dtype that the device lacks, or an option that one rank has not.
    """
    learner, precision = config.learner, config.learner.precision
    master = precision.master or config.model.dtype
    named = {
        "model.dtype": config.model.dtype,
        "learner.precision.master": master,
        "learner.precision.param": precision.param or master,
    }
    for setting, name in named.items():
        if lacking := _lacks(device, name):
            raise UserError(f"{setting} {name}: {lacking}", "use float32")
    if alone and not precision.autocast and precision.param not in (None, master):
        raise UserError(
            f"learner.precision.param {precision.param} on one rank, whose weights are {master} and never gathered",
            "set learner.precision.autocast, or train on several ranks",
        )
    if learner.parallel.cpu_offload and (alone or device.type == "cpu"):
        where = "one rank" if alone else f"device {device}"
        raise UserError(
            f"learner.parallel.cpu_offload on {where}: it moves the shards of several ranks off their GPUs",
            "set it to false",
        )


def _lacks(device: torch.device, name: str) -> str:
    """Why a device cannot compute in a dtype; empty if it can."""
    if name == "bfloat16" and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return f"{torch.cuda.get_device_name(device)} has no arithmetic for it"
    return ""


def _torch(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
