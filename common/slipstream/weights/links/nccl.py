"""Weights over NCCL, for hosts whose GPUs share a fast network. Unverified: written without a GPU to run it on.

Each pull makes a group of two ranks, the server's host and the receiver's, over a rendezvous that the server opens.
The question goes over a small TCP connection, the bytes as broadcasts of one chunk each through a buffer on each GPU.
A pull that fails aborts its group, so that a dead peer holds nobody for longer than the deadline.
"""

from __future__ import annotations

import datetime
import hmac
import importlib.util
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.errors import MessageError, SlipstreamError, TransportTimeout, UserError, WeightsError
from slipstream.lifecycle.callers import BoundedCallers
from slipstream.protocol.headers import UNREADABLE
from slipstream.weights.base import Bytes, Part
from slipstream.weights.links.control import ServerOptions
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.tcp_wire import FRAME_BYTES, ChunkRequest, check_request, cut, whole_request
from slipstream.weights.manifest import Manifest

SCHEME = "nccl://"
MEND = "use auto, tcp or ucx, or run on hosts with NVIDIA GPUs and a CUDA build of torch"


log = logging.getLogger("slipstream.weights")
SOON_SECONDS = 0.005
MOST_BYTES = 2**53  # of a version
MOST_RECEIVERS = 64
PULL_SECONDS = 3600.0


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver asks for, however long, with the token from the manifest. Both sides cut it alike."""

    token: str
    whole: ChunkRequest


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the group meets: its name and the port of the rendezvous."""

    name: str
    port: int


def decode_wanted(data: bytes) -> Wanted:
    """A question within its bounds; raises `MessageError` for anything else."""
    try:
        wanted = msgspec.json.decode(data, type=Wanted)
    except UNREADABLE as error:
        raise MessageError(f"request for weights cannot be read: {error}") from error
    check_request(wanted.whole, MOST_BYTES)
    return wanted


def check_available() -> None:
    """Refuse where NCCL cannot work.

    Raises:
        UserError: No GPU, or a torch without NCCL.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("weights.transport nccl needs torch", MEND)
    import torch

    if not torch.cuda.is_available():
        raise UserError("weights.transport nccl: this host has no CUDA device", MEND)
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        raise UserError("weights.transport nccl: this build of torch has no NCCL", MEND)


class Pair:
    """A group of two ranks: 0 sends, 1 receives; one GPU buffer of a chunk."""

    def __init__(self, host: str, port: int, name: str, rank: int, seconds: float) -> None:
        check_available()
        import torch
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupNCCL, TCPStore

        limit = datetime.timedelta(seconds=seconds)
        self._torch = torch
        store = TCPStore(host, port, 2, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        self._store = store
        self._group: Any = ProcessGroupNCCL(PrefixStore(name, store), rank, 2, ProcessGroupNCCL.Options())
        self._buffer = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cuda")
        self._limit = limit

    @property
    def port(self) -> int:
        """Where the sender's rendezvous listens."""
        return int(self._store.port)

    def send(self, chunk: Bytes) -> None:
        """Send a chunk; raises `TransportTimeout` at the deadline."""
        part = self._buffer[: len(chunk)]
        part.copy_(self._torch.from_numpy(chunk))
        self._wait(self._group.broadcast(part, 0))

    def receive(self, place: Bytes) -> None:
        """Fill `place`; raises `TransportTimeout` at the deadline."""
        part = self._buffer[: len(place)]
        self._wait(self._group.broadcast(part, 0))
        self._torch.from_numpy(place).copy_(part)

    def abort(self) -> None:
        """End the group, whatever the other rank does."""
        self._group.abort()

    def _wait(self, work: Any) -> None:
        try:
            if not work.wait(self._limit):
                raise TransportTimeout("weights over nccl: no progress within the deadline")
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            raise TransportTimeout(f"weights over nccl: {error}") from error


class NcclServer:
    """A thread that listens, and one for each receiver. Needs a GPU.

    Raises:
        UserError: No GPU, or the port is taken.
    """

    scheme = "nccl"

    def __init__(self, shelf: Shelf, options: ServerOptions, seconds: float) -> None:
        check_available()
        self._shelf, self._host, self._seconds = shelf, options.advertise or options.host, seconds
        self._token = secrets.token_hex(16)
        try:
            self._server = _Listener((options.host, options.port), self._serve)
        except OSError as error:
            raise UserError(
                f"weights.port {options.port} on {options.host} cannot be used: {error.strerror}", "free it"
            ) from error
        self.endpoint = f"{SCHEME}{self._token}@{self._host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="weights-nccl", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; receivers meet their deadline. Harmless when repeated."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        """One receiver: its question, the rendezvous, and the chunks."""
        connection.settimeout(self._seconds)
        with connection.makefile("rwb") as channel:
            wanted = decode_wanted(channel.readline(64 << 10))
            if not hmac.compare_digest(wanted.token.encode(), self._token.encode()):
                return
            name = secrets.token_hex(8)
            pair = Pair(self._host, 0, name, 0, self._seconds)
            try:
                channel.write(msgspec.json.encode(Meeting(name, pair.port)) + b"\n")
                channel.flush()
                for request in cut(wanted.whole):
                    pair.send(self._chunk(request))
            finally:
                pair.abort()

    def _chunk(self, request: ChunkRequest) -> Bytes:
        until = self._shelf.until()
        while (chunk := self._shelf.chunk(request, until)) is None:
            if time.monotonic() > until:
                raise WeightsError(f"version {request.version} does not arrive here")
            time.sleep(SOON_SECONDS)
        return chunk


class NcclPuller:
    """The receiving end. Needs a GPU."""

    scheme = "nccl"

    def __init__(self, seconds: float) -> None:
        check_available()
        self._seconds = seconds

    def pull(
        self,
        manifest: Manifest,
        endpoint: str,
        part: Part,
        target: Bytes,
        start: int,
        filled: Callable[[int], None],
    ) -> None:
        """See `base.Puller`."""
        token, _, place = endpoint.removeprefix(SCHEME).partition("@")
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        whole = whole_request(manifest, part, len(target), start)
        try:
            with (
                socket.create_connection((host, int(port)), self._seconds) as connection,
                connection.makefile("rwb") as channel,
            ):
                channel.write(msgspec.json.encode(Wanted(token, whole)) + b"\n")
                channel.flush()
                meeting = msgspec.json.decode(channel.readline(1 << 10), type=Meeting)
                pair = Pair(host, meeting.port, meeting.name, 1, self._seconds)
                self._receive(pair, list(cut(whole)), target, filled)
        except (OSError, ValueError, *UNREADABLE) as error:
            raise TransportTimeout(f"weights from nccl://{place}: {error}") from error

    def _receive(
        self, pair: Pair, requests: list[ChunkRequest], target: Bytes, filled: Callable[[int], None]
    ) -> None:
        try:
            for request in requests:
                pair.receive(target[request.offset : request.offset + request.length])
                filled(request.offset + request.length)
        finally:
            pair.abort()

    def close(self) -> None:
        """Nothing is kept open."""


class _Listener(BoundedCallers, socketserver.TCPServer):
    listener, most, seconds = "weights", MOST_RECEIVERS, PULL_SECONDS
    allow_reuse_address = True

    def __init__(self, place: tuple[str, int], serve: Callable[[socket.socket], None]) -> None:
        self._serve_one = serve
        super().__init__(place, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            self._serve_one(request)
        except (SlipstreamError, OSError) as error:
            log.info("a receiver over nccl was given up: %s", error)
