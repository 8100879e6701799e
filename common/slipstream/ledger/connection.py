"""The connection to the ledger's server: start-up checks, the function library, calls with back-off.

Every call may be sent again after a lost connection, because every function of the library answers a repeated
call as it did the first. So a call ends in its reply, in a refusal, or in a LedgerError at its deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from types import NoneType
from typing import Any, TypeVar

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from slipstream.errors import FencedError, LedgerError, StalenessError, UserError
from slipstream.ledger.records import LedgerFull, LedgerLost, MemberExpired, RunNotOpen

log = logging.getLogger("slipstream.ledger")
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
WAIT_LINE_S = 5.0
LONGEST_ATTEMPT_S = 5.0  # a packet lost in a partition must not use up the whole deadline
MAX_CONNECTIONS = 16
OLDEST_SERVER = (7, 0)

Reply = TypeVar("Reply")
Clock = Callable[[], float]

_REFUSALS: dict[str, type[Exception]] = {
    "FENCED": FencedError,
    "LEDGER": LedgerError,
    "NOTOPEN": RunNotOpen,
    "LOST": LedgerLost,
    "EXPIRED": MemberExpired,
    "STALENESS": StalenessError,
    "USER": UserError,
}
_PASSING = (ConnectionError, TimeoutError, BusyLoadingError, OSError, asyncio.TimeoutError)


def refusal(code: str, message: str) -> Exception:
    """The exception that a refusal of the library is."""
    return _REFUSALS[code](message)


@cache
def library() -> tuple[str, str]:
    """Release (digest of the source) and source of the function library, ready to load."""
    source = resources.files(__package__).joinpath("ledger.lua").read_text(encoding="utf-8")
    release = "s" + hashlib.sha256(source.encode()).hexdigest()[:16]
    return release, f"#!lua name=slipstream_{release}\nlocal RELEASE = '{release}'\n{source}"


class Connection:
    """One client to the ledger of one run.

    Args:
        client: The redis client; must not retry by itself.
        run: Run id; names the keys.
        deadline_s: Time within which a call must succeed, reconnecting included.
        now: Clock for tests (seconds); by default the server's own time is used.
    """

    def __init__(self, client: aioredis.Redis, run: str, deadline_s: float, now: Clock | None = None) -> None:
        self._client = client
        self._prefix = f"slipstream:{{{run}}}:"
        self._deadline_s = deadline_s
        self._now = now
        self._release = library()[0]
        self._number = 0

    async def call(self, kind: type[Reply], name: str, *args: Any, blobs: tuple[bytes, ...] = ()) -> Reply:
        """Call a function of the library and decode its reply."""
        return (await self.call_with_blobs(kind, name, *args, blobs=blobs))[0]

    async def call_numbered(self, kind: type[Reply], name: str, *args: Any) -> tuple[Reply, list[bytes]]:
        """As `call_with_blobs`, with the number of this sending as a last argument.

        Numbers only grow. By them a function tells a sending that was given up, and arrives late, from the one
        whose reply is awaited.
        """
        return self._decode(kind, await self._until_deadline(name, lambda: (*args, self._next_number())))

    async def do(self, name: str, *args: Any, blobs: tuple[bytes, ...] = ()) -> None:
        """Call a function of the library that answers nothing."""
        await self.call_with_blobs(NoneType, name, *args, blobs=blobs)

    async def call_with_blobs(
        self, kind: type[Reply], name: str, *args: Any, blobs: tuple[bytes, ...] = ()
    ) -> tuple[Reply, list[bytes]]:
        """As `call`, with the raw values that follow the reply.

        Raises:
            FencedError, StalenessError, LedgerError or a subclass: The ledger refused, or stayed away until the
                deadline.
        """
        return self._decode(kind, await self._until_deadline(name, lambda: args, blobs))

    def _decode(self, kind: type[Reply], answer: list[bytes]) -> tuple[Reply, list[bytes]]:
        code, payload, *rest = answer
        if code == b"OK":
            return msgspec.msgpack.decode(payload, type=kind), rest
        raise refusal(code.decode(), payload.decode())

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    async def memory(self) -> tuple[int, int]:
        """Bytes that the server uses, and its `maxmemory` (0: no limit); (0, 0) where it may not be asked.

        Raises:
            LedgerError: No answer in time.
        """
        try:
            async with asyncio.timeout(LONGEST_ATTEMPT_S):
                info = await self._client.info("memory")
        except _PASSING as error:
            raise LedgerError(f"redis.url: the server does not answer INFO ({_said(error)})") from error
        except RedisError:
            return 0, 0
        return int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))

    def _next_number(self) -> int:
        self._number = max(self._number + 1, time.time_ns() // 1000)
        return self._number

    async def _until_deadline(
        self, name: str, args: Callable[[], tuple[Any, ...]], blobs: tuple[bytes, ...] = ()
    ) -> list[bytes]:
        end = time.monotonic() + self._deadline_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(min(LONGEST_ATTEMPT_S, max(0.001, end - time.monotonic()))):
                    now = "" if self._now is None else str(round(self._now() * 1000))
                    packed = msgspec.msgpack.encode(args())
                    return await self._send((f"{self._release}_{name}", 1, self._prefix, now, packed, *blobs))
            except _PASSING as error:
                if time.monotonic() + pause >= end:
                    raise LedgerError(
                        f"redis.url: the ledger did not answer {name} within {self._deadline_s:g} s ({_said(error)})"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _send(self, command: tuple[Any, ...]) -> list[bytes]:
        try:
            reply: list[bytes] = await self._client.fcall(*command)
        except OutOfMemoryError as error:
            raise LedgerFull(f"redis is at its maxmemory ({error}); raise the limit") from error
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise LedgerError(f"redis refused a ledger function: {error}") from error
            # The server came back empty, or somebody flushed its functions.
            await load_library(self._client)
            reply = await self._client.fcall(*command)
        return reply


def open_client(url: str, password: str | None) -> aioredis.Redis:
    """A client that leaves retries to us.

    Raises:
        UserError: The address cannot be read.
    """
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": 5.0,
        "max_connections": MAX_CONNECTIONS,
        "timeout": None,  # callers wait their turn; each has its own deadline
    }
    if password is not None:
        options["password"] = password
    try:
        return aioredis.Redis.from_pool(aioredis.BlockingConnectionPool.from_url(url, **options))
    except ValueError as error:
        raise UserError(
            f"redis.url is {url!r} ({error})", "use redis://host:port, rediss:// or unix:///path"
        ) from error


async def check_server(client: aioredis.Redis, url: str, deadline_s: float) -> None:
    """Wait for the server and refuse one that would lose or lock the book.

    Raises:
        UserError: Too old, another eviction policy than noeviction, a cluster, a wrong password, or no
            permission for functions; names the setting.
        LedgerError: No answer until the deadline.
    """
    info = await _first_info(client, url, deadline_s)
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise UserError(f"redis.url: the server at {url} is version {version}", "Redis 7.0 or Valkey is needed")
    if info.get("redis_mode") == "cluster":
        raise UserError(f"redis.url: the server at {url} is in cluster mode", "use a single primary")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UserError(
            f"maxmemory-policy is {policy!r} on the server of redis.url {url}, which may evict the ledger",
            "set maxmemory-policy to noeviction",
        )
    await _load_patiently(client, url, deadline_s)


async def _load_patiently(client: aioredis.Redis, url: str, deadline_s: float) -> None:
    """Load the library over a connection that may break, as any call does."""
    end = time.monotonic() + deadline_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(max(0.001, end - time.monotonic())):
                return await load_library(client)
        except _PASSING as error:
            if time.monotonic() + pause >= end:
                raise LedgerError(
                    f"redis.url: the server at {url} went away within {deadline_s:g} s ({_said(error)})"
                ) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def load_library(client: aioredis.Redis) -> None:
    """Load the function library unless the server has it.

    Raises:
        UserError: The user of redis.url may not load functions.
    """
    try:
        await client.function_load(library()[1])
    except NoPermissionError as error:
        raise UserError(
            f"redis.url: its user may not load functions ({error})", "allow +function|load and +fcall"
        ) from error
    except OutOfMemoryError as error:
        if not await client.function_list(library=f"slipstream_{library()[0]}"):
            raise LedgerFull(f"redis is at its maxmemory ({error}); raise the limit") from error
    except ResponseError as error:
        if "already exists" not in str(error):
            raise LedgerError(f"the ledger's function library could not be loaded: {error}") from error


async def _first_info(client: aioredis.Redis, url: str, deadline_s: float) -> dict[str, Any]:
    told = time.monotonic()
    end = told + deadline_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(max(0.001, end - time.monotonic())):
                info: dict[str, Any] = await client.info()
                return info
        except _PASSING as error:
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                raise UserError(
                    f"redis.url: the password does not open {url} ({error})", "check SLIPSTREAM_REDIS_PASSWORD"
                ) from error
            if time.monotonic() + pause >= end:
                raise LedgerError(
                    f"redis.url: no server answers at {url} within {deadline_s:g} s ({_said(error)})"
                ) from error
            if time.monotonic() - told > WAIT_LINE_S:
                told = time.monotonic()
                log.info("waiting for the server of redis.url %s (%s)", url, _said(error))
        except RedisError as error:
            raise UserError(f"redis.url: the server at {url} refused INFO ({error})") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
