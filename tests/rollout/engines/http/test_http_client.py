"""Answers larger than the client's limits: whole ones arrive, and a line that never ends is the server's error."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from slipstream.rollout.engines.http import http_client
from slipstream.rollout.engines.http.http_client import HttpClient, HttpError

HEAD = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def server(*pieces):
    """Answers every request with the same bytes."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_answer_larger_than_a_line_may_be_arrives_whole(chunked):
    body = json.dumps({"text": "x" * (http_client.MAX_LINE_BYTES + (4 << 20))}).encode()
    if chunked:
        cut = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
        pieces = [b"%x\r\n%s\r\n" % (len(each), each) for each in cut]
        whole = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n"]
    else:
        whole = [HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body]
    async with server(*whole) as client:
        assert await client.json("GET", "/", 60.0) == json.loads(body)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 ", HEAD + b"X-Long: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
)
async def test_a_line_that_never_ends_is_an_error_of_the_server_that_says_it(head, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_LINE_BYTES", 1 << 16)
    async with server(head, b"1" * (1 << 18)) as client:
        with pytest.raises(HttpError, match=r"http://127.0.0.1:\d+/: .*limit"):
            await client.json("GET", "/", 20.0)
