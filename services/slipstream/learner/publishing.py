"""Publishing: the learner's weights into the transport, their manifest into the ledger.

The learner waits for one copy only. Digests, the announcement and the removal of old versions follow in the
background, one version at a time; of versions that have to wait there, only the newest is kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from slipstream.config.schema import Config
from slipstream.learner.lora_publishing import adapter_of
from slipstream.learner.model.precision import transfer_dtype
from slipstream.learner.step.trainer import Trainer
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import MemberInfo
from slipstream.transport.zeromq.keys import keys_of
from slipstream.weights.base import Committable, Publisher
from slipstream.weights.links.topology import routes
from slipstream.weights.manifest import Adapter, Canary, Manifest, encode_manifest, layout
from slipstream.weights.transports import open_publisher

_REMEMBERED = 8
_COPY_THREADS = 2  # the copy is bound by memory, and nothing else runs in the learner meanwhile


class Publishing:
    """Publishes versions of the trainer's weights; `run` must be running.

    Attributes:
        version: The newest version that was announced.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        ledger: Ledger,
        learner: str,
        tell: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._learner = learner
        self.version: int | None = None
        self._tell = tell
        self._canary = config.weights.canary_bound is not None
        self._fingerprints: OrderedDict[str, str] = OrderedDict()
        self._waiting: tuple[int, Committable, list[Canary]] | None = None
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dtype = transfer_dtype(config)
        self._adapter: Adapter | None = None
        sources = trainer.outlet.sources(self._wire)
        self._layout = layout(sources.tensors, sources.tied)
        self._compared = False
        self._publisher: Publisher = open_publisher(
            config.run.name or "",
            int(learner, 16),
            self._layout,
            config.weights,
            address=config.network.host,
            threads=_COPY_THREADS,
            keys=keys_of(config.network.keys),
        )

    async def publish(self, version: int) -> None:
        """Copy a version that the ledger has committed; it is announced once its digests are known.

        A version that still waits for its turn is given up for this newer one: the step waits for its own copy
        and for nothing else, however slow a store or a link is.
        """
        older, self._waiting = self._waiting, None
        if older is not None:
            older[1].abandon()
        self._waiting = await asyncio.to_thread(self._stage, version)
        self._idle.clear()
        self._work.set()

    async def settled(self) -> None:
        """Wait until the newest version published is announced."""
        await self._idle.wait()

    async def run(self) -> None:
        """Commit and announce what is staged, one at a time, for ever."""
        while True:
            await self._work.wait()
            self._work.clear()
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                await self._announce(*waiting)
            if self._waiting is None and not self._work.is_set():
                self._idle.set()

    def close(self) -> None:
        """Remove everything that was published; what replicas have mapped stays theirs."""
        self._publisher.close()

    def note(self) -> dict[str, Any]:
        """What others should see in the ledger: the fingerprints of the newest versions."""
        return {"fingerprints": dict(self._fingerprints)}

    @property
    def _wire(self) -> torch.dtype | None:
        """The dtype in which the weights travel; adapters keep theirs."""
        return None if self._trainer.policy.adapters else self._dtype

    def _stage(self, version: int) -> tuple[int, Committable, list[Canary]]:
        outlet = self._trainer.outlet
        staged = outlet.stage(self._publisher, version, self._wire)
        if not self._compared:  # the first byte for byte; later ones are known by their digests
            outlet.compare(self._layout, staged.data)
            self._compared = True
        if self._adapter is None:
            self._adapter = adapter_of(self._trainer.policy, self._dtype)
        return version, staged, outlet.canaries() if self._canary else []

    async def _announce(self, version: int, staged: Committable, heard: list[Canary]) -> None:
        manifest = await asyncio.to_thread(staged.commit)
        self._tell(manifest)
        members = await self._ledger.members("rollout")
        manifest = msgspec.structs.replace(
            manifest, routes=_routes(members, manifest), canary=heard, adapter=self._adapter
        )
        await self._ledger.announce(version, encode_manifest(manifest), self._learner)
        self.version = version
        self._fingerprints[str(version)] = manifest.digest
        while len(self._fingerprints) > _REMEMBERED:
            self._fingerprints.popitem(last=False)
        served = [member.version for member in members if member.version >= 0]
        if served:  # versions below the lowest that a live replica serves are needed by nobody
            self._publisher.retire(min(served))


def _routes(members: list[MemberInfo], manifest: Manifest) -> dict[str, list[str]]:
    """Hosts that keep up are in front: what they pass on comes early."""
    relays = {
        str(member.detail["host"]): str(member.detail["relay"])
        for member in sorted(members, key=lambda member: member.version)
        if member.detail.get("relay") and member.detail.get("host")
    }
    return routes(relays, list(reversed(relays)), manifest.layout.buckets)
