"""Publishing: the learner's weights into the transport, their manifest into the ledger."""

from __future__ import annotations

import asyncio

import torch

from slipstream.config.schema import Config
from slipstream.learner.trainer import Trainer
from slipstream.ledger.client import Ledger
from slipstream.weights.base import Publisher, open_publisher
from slipstream.weights.manifest import Manifest, encode_manifest, layout
from slipstream.weights.torch_io import gather


class Publishing:
    """Publishes versions of the trainer's weights."""

    def __init__(self, config: Config, trainer: Trainer, ledger: Ledger, learner: str) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._learner = learner
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        gathered = gather(trainer.tensors(), self._dtype)
        self._publisher: Publisher = open_publisher(
            config.run.name or "",
            int(learner, 16),
            layout(gathered.tensors, gathered.tied),
            transport=config.weights.transport,
            threads=config.learner.threads,
        )

    async def publish(self, version: int) -> None:
        """Copy, digest and announce a version that the ledger has committed."""
        await self._retire()
        manifest = await asyncio.to_thread(self._copy, version)
        await self._ledger.announce(version, encode_manifest(manifest), self._learner)

    def close(self) -> None:
        """Remove everything that was published; what replicas have mapped stays theirs."""
        self._publisher.close()

    def _copy(self, version: int) -> Manifest:
        return self._publisher.publish(version, gather(self._trainer.tensors(), self._dtype).tensors)

    async def _retire(self) -> None:
        """Versions below the lowest that a live replica serves are needed by nobody."""
        members = await self._ledger.members("rollout")
        served = [member.version for member in members if member.version >= 0]
        if served:
            self._publisher.retire(min(served))
