"""The servers of an http engine: which of them may be asked, and moving them all to a new version."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from slipstream.errors import SlipstreamError, UserError, WeightsError
from slipstream.rollout.engines.base import ServedWeights
from slipstream.rollout.engines.handover import Handover, hand_over
from slipstream.rollout.engines.http.http_client import HttpClient, HttpError
from slipstream.rollout.engines.http.http_config import HttpConfig
from slipstream.rollout.engines.http.http_dialects import Dialect, SglangDialect, VllmDialect
from slipstream.run.privacy import open_as_others
from slipstream.secrets import ENGINE_KEY, secret

log = logging.getLogger("slipstream.rollout")


@dataclass(slots=True, eq=False)
class HttpEndpoint:
    """One server. It is asked only while it serves the pool's version; `busy` counts its samples in flight.

    One sample at a time passes `gate`, where a server is looked at that has none.
    """

    client: HttpClient
    version: int | None = None
    busy: int = 0
    trouble: str = ""
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)


class EndpointPool:
    """Equal servers, each at one version; one that fails is left out until it takes a version again."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        key = secret(ENGINE_KEY) or ""
        self.endpoints = [HttpEndpoint(HttpClient(url.rstrip("/"), key)) for url in config.endpoints]
        self.dialect: Dialect = VllmDialect(config.model) if config.server == "vllm" else SglangDialect()

    @property
    def troubles(self) -> str:
        """Why servers are left out."""
        return "; ".join(each.trouble for each in self.endpoints if each.trouble)

    async def open(self) -> None:
        """Look at every server.

        Raises:
            UserError: One is not there, or cannot be updated though its weights are to follow the learner's.
        """
        for endpoint in self.endpoints:
            url = endpoint.client.base
            try:
                await self.dialect.open(endpoint.client)
                updatable = self._config.fixed_weights or await self.dialect.can_update(endpoint.client)
            except HttpError as error:
                raise UserError(
                    f"rollout.engine.options: endpoints: {error}", "start the server, or mend the URL"
                ) from None
            if not updatable:
                raise UserError(
                    f"rollout.engine.options: endpoints: {url} takes no new weights, so its tokens would carry false "
                    "versions",
                    "start it as docs/engines.md says, or set fixed_weights: true to generate with what it has",
                )
            if self._config.fixed_weights:
                endpoint.version = 0

    def pick(self, version: int) -> HttpEndpoint | None:
        """The server with the fewest samples among those that serve the version."""
        serving = [endpoint for endpoint in self.endpoints if endpoint.version == version]
        return min(serving, key=lambda endpoint: endpoint.busy, default=None)

    def lost(self, endpoint: HttpEndpoint, why: str) -> None:
        """Leave a server out until it takes a version again, or, with fixed weights, until it answers."""
        endpoint.version = None
        if why != endpoint.trouble:
            endpoint.trouble = why
            log.warning("a server is left out: %s", why)

    async def enter(self, endpoint: HttpEndpoint, version: int) -> bool:
        """Count a sample at a server; False when the server was left out, or moved, before its turn.

        A server that died and is back has other weights. What is in flight would have broken off with it, so one
        with nothing in flight is asked.

        Raises:
            HttpError: It serves another version than the one it was given.
        """
        async with endpoint.gate:
            if endpoint.version != version:
                return False
            if not endpoint.busy and not self._config.fixed_weights:
                served = await self.dialect.served(endpoint.client)
                if served != str(version):
                    raise HttpError(f"{endpoint.client.base}: serves version {served} instead of {version}")
            endpoint.busy += 1
            return True

    async def update(self, weights: ServedWeights) -> None:
        """Move every server; one that does not take the version is left out. While none does, all are asked again.

        Raises:
            WeightsError: None of them took it within `swap_seconds`.
        """
        end = time.monotonic() + self._config.swap_seconds
        with self._offer(weights) as handover:
            while not any(await asyncio.gather(*(self._update_one(each, handover) for each in self.endpoints))):
                if time.monotonic() + self._config.probe_seconds > end:
                    raise WeightsError(f"no server took version {weights.version}: {self.troubles}")
                await asyncio.sleep(self._config.probe_seconds)

    async def mend(self, weights: ServedWeights | None) -> None:
        """Give what is served to the servers that were left out and answer again; None: their weights are fixed."""
        out = [each for each in self.endpoints if each.version is None and not each.busy]
        found = zip(out, await asyncio.gather(*(self._answers(each) for each in out)), strict=True)
        there = [endpoint for endpoint, answers in found if answers]
        if weights is None:
            for endpoint in there:
                endpoint.version, endpoint.trouble = 0, ""
        elif there:
            with self._offer(weights) as handover:
                await asyncio.gather(*(self._update_one(each, handover) for each in there))

    async def _answers(self, endpoint: HttpEndpoint) -> bool:
        try:
            await self.dialect.open(endpoint.client)
        except HttpError as error:
            self.lost(endpoint, str(error))
            return False
        return True

    async def _update_one(self, endpoint: HttpEndpoint, handover: Handover) -> bool:
        endpoint.version = None
        try:
            await self.dialect.update(endpoint.client, handover, self._config.swap_seconds)
        except (SlipstreamError, TimeoutError) as error:
            self.lost(endpoint, str(error) or f"{endpoint.client.base}: no answer in time")
            return False
        endpoint.version, endpoint.trouble = handover.version, ""
        return True

    @contextmanager
    def _offer(self, weights: ServedWeights) -> Iterator[Handover]:
        """Where the servers find the version: this host's memory, or a file or folder that they share with us."""
        with hand_over(weights) as handover:
            share = self._config.share
            if share is None:
                yield handover
                return
            target = share / f"slipstream-{secrets.token_hex(4)}-{weights.version}"
            try:
                if self._config.server == "vllm":
                    shutil.copyfile(handover.path, target)
                else:
                    _write_model(self._config.folder, weights, target)
                yield replace(handover, path=str(target))
            finally:
                shutil.rmtree(target, ignore_errors=True) if target.is_dir() else target.unlink(missing_ok=True)


def _write_model(folder: Path, weights: ServedWeights, target: Path) -> None:
    """A model folder with these weights: config and tokenizer beside one safetensors file."""
    import torch
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, target / path.name)
    tensors = {}
    for name, array in weights.tensors.items():
        flat = torch.from_numpy(np.array(array).view(np.int16) if array.dtype == np.uint16 else np.array(array))
        tensors[name] = flat.view(torch.bfloat16) if array.dtype == np.uint16 else flat
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    open_as_others(target / "model.safetensors")
