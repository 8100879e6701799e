"""A small server that speaks what the http engine needs of vLLM's: completions by ids, and weight updates."""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import torch


class TinyServer:
    """Samples from a tiny model by full forward passes; `faults` maps a path to what happens instead of an answer."""

    def __init__(self, model: Any, *, updates: bool = True, raw_logprobs: bool = False) -> None:
        self.model, self.updates, self.raw_logprobs = model.eval(), updates, raw_logprobs
        self.version = "default"
        self.faults: dict[str, Callable[[], None]] = {}
        self.delay: Callable[[], Awaitable[object]] | None = None  # before a completion
        self.without_logprobs = False
        self.gives_up_after = 0  # tokens of a completion, of the next one only
        self.down = False  # as when nothing listens
        self.requests: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        self._incoming: dict[str, torch.Tensor] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen on a free port; returns the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, target, _ = (await reader.readuntil(b"\r\n")).decode().split()
            length = 0
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                name, _, value = line.decode().partition(":")
                if name.lower() == "content-length":
                    length = int(value)
                if name.lower() == "authorization":
                    self.keys.add(value.strip())
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._answer(f"{method} {urlsplit(target).path}", body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        self.requests.append((path, body))
        if self.down:
            return
        if fault := self.faults.get(path):
            fault()
            return  # the connection is closed without an answer
        if path == "POST /v1/completions":
            await self._complete(body, writer)
            return
        answer = self._control(path, body)
        status, content = (
            ("200 OK", answer) if answer is not None else ("404 Not Found", {"detail": "Not Found"})
        )
        data = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    def _control(self, path: str, body: Any) -> Any:
        if path == "GET /v1/models":
            return {"data": [{"id": "tiny"}]}
        if not self.updates:
            return None
        if path == "POST /start_weight_update":
            self._incoming = {}
        if path == "POST /update_weights":
            self._read(body["update_info"])
        if path == "POST /finish_weight_update":
            self.model.load_state_dict(self._incoming, strict=False)
            self.version = body["weight_version"]
        if path == "GET /weight_info":
            return {"weight_version": self.version}
        known = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
        return {} if path.rpartition("/")[2] in (*known, "pause", "resume") else None

    def _read(self, info: Any) -> None:
        fd = os.open(info["path"], os.O_RDONLY)
        try:
            data = mmap.mmap(fd, info["nbytes"], prot=mmap.PROT_READ)[:]
        finally:
            os.close(fd)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for name, dtype, shape, offset in info["tensors"]:
            kind = getattr(torch, dtype)
            count = math.prod(shape) * kind.itemsize
            self._incoming[name] = flat[offset : offset + count].view(kind).view(shape).float()

    async def _complete(self, body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if self.delay is not None:
            await self.delay()
        generator = torch.Generator().manual_seed(body["seed"])
        ids, made = list(body["prompt"]), 0
        while made < body["max_tokens"]:
            token, logprobs = self._next(ids, body["temperature"], generator)
            ids.append(token)
            made += 1
            stops = token in body["stop_token_ids"]
            reason = "stop" if stops else "length" if made == body["max_tokens"] else None
            if given_up := made == self.gives_up_after:
                self.gives_up_after, reason = 0, "abort"
            if self.down:
                return
            self._event(writer, token, logprobs, body["logprobs"], reason)
            await writer.drain()
            await asyncio.sleep(0)
            if stops or given_up or writer.is_closing():
                break
        _send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @torch.no_grad()
    def _next(self, ids: list[int], temperature: float, generator: torch.Generator) -> tuple[int, torch.Tensor]:
        logits = self.model(torch.tensor([ids])).logits[0, -1].double()
        warped = torch.log_softmax(logits / (temperature or 1.0), -1)
        shown = torch.log_softmax(logits, -1) if self.raw_logprobs else warped
        if not bool(warped.isfinite().all()):
            return 0, shown
        if temperature == 0:
            return int(warped.argmax()), shown
        return int(torch.multinomial(warped.exp(), 1, generator=generator)), shown

    def _event(self, writer: Any, token: int, logprobs: torch.Tensor, top: int, reason: str | None) -> None:
        number = float(logprobs[token])
        best = logprobs.topk(top) if top else None
        heads = {f"token_id:{i}": float(v) for v, i in zip(*best, strict=True)} if best is not None else {}
        choice: dict[str, Any] = {
            "token_ids": [token],
            "logprobs": {
                "token_logprobs": [number if math.isfinite(number) else None],
                "top_logprobs": [heads],
            },
            "finish_reason": reason,
        }
        if self.without_logprobs:
            choice["logprobs"] = None
        _send(writer, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
