"""The learner's ranks under torchrun: who they are, and the few things that they do together.

Rank 0 talks to buffer, ledger and generators; the others repeat what it does. It names each piece of common work
in torchrun's store, where the others wait without a limit, since a learner may be without a batch for long; the
collectives of the work itself have a deadline. Everything that travels is a flat tensor. Without torchrun there is
one rank, and nothing here costs anything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.config.sections.parallel_config import ParallelSection
from slipstream.config.sections.services_config import LearnerSection
from slipstream.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_POLL_S = 0.01
_DISMISSAL_S = 2.0
# Not all work makes rank 0 wait for the others, but each step does, and few announcements lie between two steps.
_KEPT = 64
STOP = "stop"
_STORE_PREFIX = "slipstream/work"
_NOTE_PREFIX = "slipstream/note"


@dataclass
class Ranks:
    """One process's place among the ranks.

    Attributes:
        rank: Number of this process.
        size: How many there are.
        device: Where its tensors live.
        mesh: (replicate, shard), or None for a single process.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    _announced: int = 0
    _saves: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process talks to the world."""
        return self.rank == 0

    @property
    def others(self) -> range:
        """The ranks other than 0."""
        return range(1, self.size)

    @property
    def first_copy(self) -> bool:
        """Whether this rank's shards are the first of their replicas."""
        return self.mesh is None or self.mesh.get_local_rank("replicate") == 0

    def next_save(self) -> int:
        """Number of the next common save: alike on all ranks, and never used twice in one store."""
        self._saves += 1
        return self._saves

    def note(self, key: str, value: bytes) -> None:
        """Tell all ranks something under a key; from any thread."""
        _store().set(f"{_NOTE_PREFIX}/{key}", value)

    def noted(self, key: str) -> bytes | None:
        """What is told under a key, or None as long as nothing is; from any thread.

        Raises:
            RuntimeError: The store is gone, and with it the run.
        """
        name = f"{_NOTE_PREFIX}/{key}"
        return bytes(_store().get(name)) if _store().check([name]) else None

    def forget(self, key: str) -> None:
        """Remove what was told."""
        _store().delete_key(f"{_NOTE_PREFIX}/{key}")

    def announce(self, work: str) -> None:
        """Rank 0: call the others to a piece of common work; nothing on the others, who have been called."""
        if self.size > 1 and self.leads:
            self._announced += 1
            _store().set(f"{_STORE_PREFIX}/{self._announced}", work)
            if self._announced > _KEPT:
                _store().delete_key(f"{_STORE_PREFIX}/{self._announced - _KEPT}")

    def call(self, work: str, frames: Callable[[], Sequence[bytes | memoryview]] | None = None) -> None:
        """Rank 0: have the others do the same, with the same arguments; they find out by `called` and `share`."""
        if self.size > 1 and self.leads:
            self.announce(work)
            if frames is not None:
                self.share(frames())

    def called(self) -> str:
        """The others: wait, without a limit, for the next piece of common work.

        Raises:
            RuntimeError: The store is gone, and with it the run.
        """
        self._announced += 1
        key = f"{_STORE_PREFIX}/{self._announced}"
        while not _store().check(
            [key]
        ):  # its blocking wait prints a warning each time that its limit is reached
            time.sleep(_POLL_S)
        work = _store().get(key).decode()
        if work == STOP:
            _store().set(f"{_STORE_PREFIX}/{self._announced}/{self.rank}", "")
        return work

    def dismiss(self) -> None:
        """Rank 0: send the others home, and wait a moment until they know, since its store ends with it."""
        self.announce(STOP)
        heard = [f"{_STORE_PREFIX}/{self._announced}/{rank}" for rank in self.others]
        deadline = time.monotonic() + _DISMISSAL_S
        while not _store().check(heard) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def share(self, frames: Sequence[bytes | memoryview] | None) -> list[bytes]:
        """Rank 0's frames on every rank, as two flat tensors: their lengths, and their bytes."""
        if self.size == 1:
            return [bytes(frame) for frame in frames or ()]
        count = self._from_leader(torch.tensor([len(frames or ())], dtype=torch.int64), (1,))
        lengths = self._from_leader(
            torch.tensor([len(frame) for frame in frames or ()], dtype=torch.int64), (int(count[0]),)
        )
        content = torch.frombuffer(bytearray(b"".join(frames or ()) or b"\0"), dtype=torch.uint8)
        total = int(lengths.sum())
        flat = self._from_leader(content[:total], (total,)).cpu().numpy().tobytes()
        ends = np.cumsum(lengths.cpu().numpy())
        return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]

    def add_up(self, values: Tensor) -> Tensor:
        """Sum over the ranks, on the tensor's own device."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Maximum over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank, so that all decide alike."""
        return bool(self.largest(torch.tensor([int(flag)]))[0])

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        moved = values.to(self.device, copy=True)
        dist.all_reduce(moved, op)
        return moved.to(values.device)

    def _from_leader(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        moved = (
            values.to(self.device) if self.leads else torch.empty(shape, dtype=values.dtype, device=self.device)
        )
        dist.broadcast(moved, 0)
        return moved


def open_ranks(settings: LearnerSection) -> Ranks:
    """Join the other ranks, if torchrun started this process.

    Args:
        settings: The device, how the ranks are laid out, and the deadline of each collective.

    Raises:
        UserError: The number of ranks does not fit the layout, or the device is not there.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = settings.parallel
    if size == 1 and parallel.ranks in (None, 1):
        return Ranks()
    from torch.distributed.device_mesh import init_device_mesh

    _check(parallel, size)
    place = _device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
    # With offloading, norms and gradients are summed in host memory, which NCCL does not reach.
    on_gpu = "cpu:gloo,cuda:nccl" if parallel.cpu_offload else "nccl"
    backend = on_gpu if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=parallel.timeout_seconds))
    shape = (parallel.replicate, size // parallel.replicate)
    mesh = init_device_mesh(place.type, shape, mesh_dim_names=("replicate", "shard"))
    return Ranks(dist.get_rank(), size, place, mesh)


def leave(ranks: Ranks) -> None:
    """Rank 0: send the others home."""
    if ranks.size > 1:
        with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
            ranks.dismiss()
        close_ranks()


def close_ranks() -> None:
    """Leave the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check(settings: ParallelSection, size: int) -> None:
    if settings.ranks not in (None, size):
        raise UserError(
            f"learner.parallel.ranks is {settings.ranks}, but {size} processes were started",
            f"start {settings.ranks} with torchrun --nproc-per-node, or set it to {size}",
        )
    if size % settings.replicate:
        raise UserError(
            f"learner.parallel.replicate {settings.replicate} does not divide the {size} ranks",
            "choose a divisor of the number of ranks",
        )


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UserError(
            f"learner.device {name!r} with several ranks", "use auto, cpu or cuda: each rank takes its own"
        )
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"learner.device {name!r}: rank {local_rank} of this host, {torch.cuda.device_count()} CUDA devices",
            "start at most one rank per device, or use cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
