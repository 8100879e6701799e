"""Publishing: the learner's weights into the transport, their manifest into the ledger.

The learner waits for one copy only. Digests, the announcement and the removal of old versions follow in the
background, one version at a time.
"""

from __future__ import annotations

import asyncio

import torch

from slipstream.config.schema import Config
from slipstream.learner.trainer import Trainer
from slipstream.ledger.client import Ledger
from slipstream.weights.base import Committable, Publisher, open_publisher
from slipstream.weights.manifest import encode_manifest, layout
from slipstream.weights.torch_io import gather

_COPY_THREADS = 2  # the copy is bound by memory, and nothing else runs in the learner meanwhile


class Publishing:
    """Publishes versions of the trainer's weights; `run` must be running.

    Attributes:
        version: The newest version that was announced.
    """

    def __init__(self, config: Config, trainer: Trainer, ledger: Ledger, learner: str) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._learner = learner
        self.version: int | None = None
        self._staged: asyncio.Queue[tuple[int, Committable]] = asyncio.Queue(1)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        gathered = gather(trainer.tensors(), self._dtype)
        self._publisher: Publisher = open_publisher(
            config.run.name or "",
            int(learner, 16),
            layout(gathered.tensors, gathered.tied),
            transport=config.weights.transport,
            threads=_COPY_THREADS,
        )

    async def publish(self, version: int) -> None:
        """Copy a version that the ledger has committed; it is announced once its digests are known."""
        await self.settled()
        staged = await asyncio.to_thread(self._stage, version)
        self._staged.put_nowait((version, staged))

    async def settled(self) -> None:
        """Wait until what was published is announced."""
        await self._staged.join()

    async def run(self) -> None:
        """Commit and announce what is staged, for ever."""
        while True:
            version, staged = await self._staged.get()
            manifest = await asyncio.to_thread(staged.commit)
            await self._ledger.announce(version, encode_manifest(manifest), self._learner)
            self.version = version
            await self._retire()
            self._staged.task_done()

    def close(self) -> None:
        """Remove everything that was published; what replicas have mapped stays theirs."""
        self._publisher.close()

    def _stage(self, version: int) -> Committable:
        return self._publisher.stage(version, gather(self._trainer.tensors(), self._dtype).tensors)

    async def _retire(self) -> None:
        """Versions below the lowest that a live replica serves are needed by nobody."""
        members = await self._ledger.members("rollout")
        served = [member.version for member in members if member.version >= 0]
        if served:
            self._publisher.retire(min(served))
