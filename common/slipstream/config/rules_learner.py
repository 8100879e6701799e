"""Settings of the learner's steps that contradict each other."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.config.sections.governor_config import governor_refusals
from slipstream.config.sections.precision_config import precision_refusals

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))


def missing_compiler(config: Config) -> list[str]:
    """What `learner.compile` needs on a CPU and is not here: inductor writes C++ there."""
    learner = config.learner
    on_cpu = learner.device == "cpu" or (learner.device == "auto" and not any(path.exists() for path in _GPUS))
    compiler = os.environ.get("CXX", "g++")  # as inductor looks for it
    if not learner.compile or not on_cpu or shutil.which(compiler) is not None:
        return []
    return [
        f"learner.compile: there is no {compiler} here, and on a CPU torch.compile needs a C++ compiler; install "
        "one (Debian: apt install g++), name it in CXX, or set learner.compile=false"
    ]


def step_refusals(config: Config) -> list[str]:
    """Refusals, each naming both settings."""
    found = []
    if not _DEVICE.fullmatch(config.learner.device):
        found.append(f"learner.device {config.learner.device!r} is no device; use auto, cpu, cuda or cuda:N")
    n_mini, groups = config.learner.n_mini, config.batch.groups
    if groups % n_mini:
        found.append(
            f"learner.n_mini {n_mini} does not divide batch.groups {groups}, so the parts of a batch would differ in "
            "size and their groups in weight; choose a divisor"
        )
    if config.learner.optimizer.kind == "muon" and config.learner.parallel.cpu_offload:
        found.append(
            "learner.optimizer.kind muon makes its update on the GPUs, but learner.parallel.cpu_offload keeps the "
            "weights in host memory; use adamw, or set learner.parallel.cpu_offload to false"
        )
    parallel = config.learner.parallel
    if parallel.ranks is not None and parallel.ranks % parallel.replicate:
        found.append(
            f"learner.parallel.replicate {parallel.replicate} does not divide learner.parallel.ranks "
            f"{parallel.ranks}; choose a divisor"
        )
    stale = config.staleness
    return [
        *found,
        *governor_refusals(config.learner.governor, stale.policy, stale.max_staleness),
        *precision_refusals(config.learner.precision),
    ]
