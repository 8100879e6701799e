"""The ledger of a run for a tool that only looks: the live server if the run is up, else one started for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.errors import UserError
from slipstream.ledger.server import embedded_server
from slipstream.run.folder import RunFolder
from slipstream.supervisor.child import Child, ProcessSpec
from slipstream.supervisor.data_lock import data_lock
from slipstream.supervisor.embedded import EmbeddedSocket


@asynccontextmanager
async def lone_server(folder: RunFolder) -> AsyncIterator[str]:
    """URL of the run's embedded ledger.

    Raises:
        UserError: The run has no ledger of its own, as one that never started.
    """
    if (url := folder.live_url) is not None:
        yield url
        return
    if not folder.redis.is_dir() or not any(folder.redis.iterdir()):
        raise UserError(
            f"run {folder.name} has no ledger in {folder.redis}", "it never got as far as starting one"
        )
    with folder.held():
        async with data_lock(folder.redis) as lock:
            socket = EmbeddedSocket()
            server = embedded_server(folder.redis, socket=socket.path)
            spec = ProcessSpec("valkey", server.command, foreign=True, keep=(lock,))
            child = await Child.start(spec, folder.logs / "valkey.log", echo=None)
            try:
                await socket.ready()
                yield socket.url
            finally:
                await child.stop(4.0)
                socket.remove()
