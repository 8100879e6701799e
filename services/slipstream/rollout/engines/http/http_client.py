"""A small HTTP/1.1 client for engines: JSON out, JSON or server-sent events in, a deadline on every wait.

One connection a request: a generation lasts seconds, so nothing is gained by keeping connections, and closing one
is how a server is told to stop generating.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slipstream.errors import SlipstreamError

CONNECT_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20


class HttpError(SlipstreamError):
    """A server that cannot be reached, answers with an error, or breaks off."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Talks to one server, such as `http://host:8000`; `key` is sent as a bearer token and never logged."""

    base: str
    key: str = ""

    async def json(self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to one request, decoded; {} where it has no body.

        Raises:
            HttpError: Not reached, no answer within `seconds`, a status of 400 or above, or no JSON.
        """
        async with contextlib.aclosing(self._lines(method, path, seconds, body)) as lines:
            content = b"".join([line async for line in lines])
        try:
            return json.loads(content) if content.strip() else {}
        except ValueError:
            raise HttpError(f"{self.base}{path}: the answer is no JSON") from None

    async def events(self, path: str, seconds: float, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Server-sent events of a POST, each decoded; leaving early closes the connection.

        Args:
            seconds: Longest wait for the next line.

        Raises:
            HttpError: As `json`, or the stream ended without its mark.
        """
        async with contextlib.aclosing(self._lines("POST", path, seconds, body)) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    yield json.loads(data)
                except ValueError:
                    raise HttpError(f"{self.base}{path}: an event is no JSON") from None
        raise HttpError(f"{self.base}{path}: the stream broke off")

    async def _lines(
        self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None
    ) -> AsyncIterator[bytes]:
        """Lines of the answer's body."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(min(seconds, CONNECT_SECONDS)):
                reader, writer = await self._connect()
            writer.write(self._request(method, path, body))
            async with asyncio.timeout(seconds):
                await writer.drain()
                status, headers = await _read_head(reader)
            lines = _body_lines(reader, headers)
            if status >= 400:
                async with asyncio.timeout(seconds):
                    text = b"".join([line async for line in lines])[:500].decode("utf-8", "replace").strip()
                raise HttpError(f"{self.base}{path}: status {status}: {text}", status)
            while True:
                async with asyncio.timeout(seconds):
                    line = await anext(lines, None)
                if line is None:
                    return
                yield line
        except TimeoutError:
            raise HttpError(f"{self.base}{path}: no answer within {seconds:g} s") from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"{self.base}{path}: {error or type(error).__name__}") from error
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.base)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        return await asyncio.open_connection(url.hostname, port, ssl=secure, limit=MAX_LINE_BYTES)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        url = urlsplit(self.base)
        data = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {url.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return status, headers


async def _body_lines(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    rest: list[bytes] = []  # joined once: an answer of many megabytes may be one line
    async for piece in _pieces(reader, headers):
        first, *more = piece.split(b"\n")
        rest.append(first)
        for begun in more:
            yield b"".join(rest) + b"\n"
            rest = [begun]
    if last := b"".join(rest):
        yield last


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes in: in chunks, of a known length, or until the server closes."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers.get("content-length", -1))
    while left and (piece := await reader.read(65536 if left < 0 else min(left, 65536))):
        left -= len(piece) if left > 0 else 0
        yield piece
    if left > 0:
        raise EOFError("the answer broke off")
