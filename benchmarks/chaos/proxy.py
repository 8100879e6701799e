"""A proxy between the processes of a stack, so that the network of any one of them can fail without privileges.

Every connection passes through it: to the ledger's server, and, since the members' endpoints are replaced by ours,
each data socket. Whose connection it is follows from the client's port and its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

Mode = Literal["cut", "stall"]
Target = Path | int
"""A unix socket, or a port on 127.0.0.1."""


@dataclass(eq=False)
class _Link:
    """One connection through the proxy."""

    target: str
    client: int
    writers: list[asyncio.StreamWriter]
    flows: asyncio.Event = field(default_factory=asyncio.Event)

    def break_off(self) -> None:
        self.flows.set()
        for writer in self.writers:
            writer.transport.abort()


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the network: connections from these processes, and to these targets."""

    mode: Mode
    pids: frozenset[int]
    targets: frozenset[str]


class Proxy:
    """Runs in a thread of its own; all methods may be called from others."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: set[_Link] = set()
        self._troubles: list[Trouble] = []
        self._servers: dict[str, asyncio.Server] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def serve(self, name: str, target: Target) -> int:
        """Listen for a target; returns the port. A name that is served anew is closed first."""
        return self._call(self._serve(name, target))

    def begin(self, trouble: Trouble) -> None:
        """From now on these connections fail."""
        self._call(self._begin(trouble))

    def end(self, trouble: Trouble) -> None:
        """What was held flows again, unless another trouble holds it too."""
        self._call(self._end(trouble))

    def close(self) -> None:
        """Close everything."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, name: str, target: Target) -> int:
        if name in self._servers:
            self._servers.pop(name).close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await self._carry(name, target, reader, writer)
            writer.transport.abort()

        server = self._servers[name] = await asyncio.start_server(accept, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _carry(
        self, name: str, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = _Link(name, writer.get_extra_info("peername")[1], [writer])
        if self._mode(link) == "cut":
            return
        if isinstance(target, Path):
            inner, outward = await asyncio.open_unix_connection(str(target))
        else:
            inner, outward = await asyncio.open_connection("127.0.0.1", target)
        link.writers.append(outward)
        self._links.add(link)
        self._settle([link])
        try:
            flows = [
                asyncio.ensure_future(_flow(link, reader, outward)),
                asyncio.ensure_future(_flow(link, inner, writer)),
            ]
            await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
            for flow in flows:
                flow.cancel()
            await asyncio.gather(*flows, return_exceptions=True)
        finally:
            self._links.discard(link)
            link.break_off()

    async def _begin(self, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self._settle(list(self._links))

    async def _end(self, trouble: Trouble) -> None:
        self._troubles.remove(trouble)
        self._settle(list(self._links))

    async def _close(self) -> None:
        for server in self._servers.values():
            server.close()
        for link in list(self._links):
            link.break_off()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _settle(self, links: Iterable[_Link]) -> None:
        ports = {pid: _ports(pid) for trouble in self._troubles for pid in trouble.pids}
        for link in links:
            mode = self._mode(link, ports)
            if mode == "cut":
                link.break_off()
            elif mode == "stall":
                link.flows.clear()
            else:
                link.flows.set()

    def _mode(self, link: _Link, ports: dict[int, set[int]] | None = None) -> Mode | None:
        modes = set()
        for trouble in self._troubles:
            if link.target in trouble.targets or any(
                link.client in (_ports(pid) if ports is None else ports[pid]) for pid in trouble.pids
            ):
                modes.add(trouble.mode)
        return "cut" if "cut" in modes else "stall" if modes else None


async def _flow(link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            await link.flows.wait()
            writer.write(data)
            await writer.drain()


def _ports(pid: int) -> set[int]:
    """Local TCP ports of a process."""
    try:
        return {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.laddr}
    except psutil.Error:
        return set()
