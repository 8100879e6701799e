"""Weights over TCP: the learner's host serves its shared memory, a replica elsewhere pulls into its own.

Use the shared-memory transport on the same host: this one costs about ten times the CPU per byte.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import zmq

from slipstream.errors import MessageError, TransportTimeout, WeightsError
from slipstream.transport.keys import KeyPair
from slipstream.weights import segments
from slipstream.weights.base import Bytes, Source
from slipstream.weights.digests import bucket_digest, compare
from slipstream.weights.manifest import Layout, Manifest, check_manifest, mismatches
from slipstream.weights.shm import ShmPublisher, Staged
from slipstream.weights.shm_reader import ShmSubscriber, ShmWeights, map_version
from slipstream.weights.tcp_server import WeightServer
from slipstream.weights.tcp_wire import FRAME_BYTES, ChunkRequest, decode_reply

WINDOW = 4


class TcpPublisher:
    """A shared-memory publisher whose versions are served to other hosts too."""

    def __init__(self, shm: ShmPublisher, server: WeightServer) -> None:
        self._shm, self._server = shm, server

    def publish(self, version: int, tensors: Mapping[str, Source]) -> Manifest:
        """Stage and commit in one call; raises as `ShmPublisher.publish`."""
        return self.stage(version, tensors).commit()

    def stage(self, version: int, tensors: Mapping[str, Source]) -> Staged:
        """The one copy; the tensors may change once this returns."""
        staged = self._shm.stage(version, tensors)
        return replace(staged, _commit=lambda _, digests: self._server.offer(staged.commit(digests)))

    def retire(self, acknowledged: int) -> None:
        """Remove the versions below the lowest that every live replica serves; never the newest."""
        self._server.retire(acknowledged)
        self._shm.retire(acknowledged)

    def close(self) -> None:
        """Stop serving and remove all files; harmless when repeated."""
        self._server.close()
        self._shm.close()


@dataclass(frozen=True, slots=True)
class Dial:
    """How to reach a server: own keys and the server's public key for CURVE, and the wait for each frame."""

    keys: KeyPair | None = None
    server_key: str = ""
    frame_seconds: float = 10.0


class TcpSubscriber:
    """Pulls versions from a learner's host into two buffers of this host's shared memory.

    Args:
        expected: The layout of the engine's own model; a version that differs is refused.
        directory: Where the buffers lie. threads: Threads that verify, while further frames arrive.
    """

    def __init__(
        self,
        dial: Dial | None = None,
        *,
        expected: Layout | None = None,
        directory: Path = segments.SHM,
        threads: int = 1,
    ) -> None:
        self._dial, self._expected, self._directory = dial or Dial(), expected, directory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-verify")
        self._buffers: ShmPublisher | None = None
        self._fetched = 0

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Pull a version and verify every bucket as it arrives.

        Raises:
            WeightsError: It is gone, corrupted or does not fit; nothing of it is used.
            TransportTimeout: The server did not send the next frame in time.
            UserError: No space for it.
        """
        check_manifest(manifest)
        if self._expected and (problems := mismatches(self._expected, manifest.layout)):
            raise WeightsError(f"version {manifest.version} does not fit the model: " + "; ".join(problems))
        if "tcp" not in manifest.locations:
            raise WeightsError(f"version {manifest.version} is not offered over tcp")
        buffers = self._open_buffers(manifest)
        buffers.retire(self._fetched)  # the one before it: by now the engine reads only the last
        self._fetched += 1
        staged = buffers.fill(self._fetched, lambda data: self._receive(manifest, data))
        return ShmWeights(manifest, map_version(self._directory, staged.commit(manifest.digests)))

    def close(self) -> None:
        """Remove the buffers, but for what is still mapped; harmless when repeated."""
        self._pool.shutdown()
        self._context.destroy(linger=0)
        if self._buffers is not None:
            self._buffers.close()

    def _open_buffers(self, manifest: Manifest) -> ShmPublisher:
        if self._buffers is not None and self._buffers.layout != manifest.layout:
            self._buffers.close()
            self._buffers = None
        if self._buffers is None:
            name = f"tcp.{os.getpid()}.{secrets.token_hex(4)}"
            self._buffers = ShmPublisher(name, 0, manifest.layout, directory=self._directory, threads=1)
        return self._buffers

    def _receive(self, manifest: Manifest, target: Bytes) -> None:
        """Fill `target` [total_bytes] frame by frame, with up to `WINDOW` requests under way."""
        socket = self._connect(manifest.locations["tcp"])
        digests = _Digests(manifest, target, self._pool)
        try:
            requests = _requests(manifest)
            for request in requests[:WINDOW]:
                socket.send(msgspec.msgpack.encode(request))
            for index, request in enumerate(requests):
                _take_frame(self._next(socket, manifest), request, target)
                if index + WINDOW < len(requests):
                    socket.send(msgspec.msgpack.encode(requests[index + WINDOW]))
                digests.filled(request.offset + request.length)
            compare(digests.results(), manifest)
        finally:
            socket.close(linger=0)
            digests.wait()

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        """A socket of its own for each version, so that no late frame of an earlier one can come in."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        if self._dial.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._dial.server_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._dial.keys.secret.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._dial.keys.public.encode())
        socket.connect(endpoint)
        return socket

    def _next(self, socket: zmq.Socket[bytes], manifest: Manifest) -> list[zmq.Frame]:
        if not socket.poll(round(self._dial.frame_seconds * 1000)):
            raise TransportTimeout(
                f"weights from {manifest.locations['tcp']}: no frame of version {manifest.version} "
                f"within {self._dial.frame_seconds:g} s"
            )
        return socket.recv_multipart(copy=False)


class AutoSubscriber:
    """Maps a version that lies on this host, and pulls any other over TCP."""

    def __init__(self, shm: ShmSubscriber, tcp: TcpSubscriber) -> None:
        self._shm, self._tcp = shm, tcp

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Raises as the transport that it chooses."""
        if "tcp" in manifest.locations and not self._shm.has(manifest):
            return self._tcp.fetch(manifest)
        return self._shm.fetch(manifest)

    def close(self) -> None:
        """Close both; harmless when repeated."""
        self._shm.close()
        self._tcp.close()


class _Digests:
    """Digests of buckets, begun as soon as their last byte is in."""

    def __init__(self, manifest: Manifest, data: Bytes, pool: ThreadPoolExecutor) -> None:
        self._layout, self._data, self._pool = manifest.layout, data, pool
        self._running: list[Future[str]] = []

    def filled(self, stop: int) -> None:
        """All bytes before `stop` are in place."""
        while len(self._running) < self._layout.buckets and self._layout.bucket(len(self._running))[1] <= stop:
            part = self._data[slice(*self._layout.bucket(len(self._running)))]
            self._running.append(self._pool.submit(bucket_digest, part))

    def results(self) -> list[str]:
        return [future.result() for future in self._running]

    def wait(self) -> None:
        """Until nothing reads the bytes any more."""
        for future in self._running:
            future.exception()


def _requests(manifest: Manifest) -> list[ChunkRequest]:
    total = manifest.layout.total_bytes
    return [
        ChunkRequest(
            run=manifest.run,
            incarnation=manifest.incarnation,
            version=manifest.version,
            offset=offset,
            length=min(FRAME_BYTES, total - offset),
        )
        for offset in range(0, total, FRAME_BYTES)
    ]


def _take_frame(frames: list[zmq.Frame], request: ChunkRequest, target: Bytes) -> None:
    """Copy one reply into its place; raises `WeightsError` for a refusal or a reply to something else."""
    try:
        reply = decode_reply(frames[0].bytes)
    except MessageError as error:
        raise WeightsError(str(error)) from error
    if reply.problem:
        raise WeightsError(reply.problem)
    fits = len(frames) == 2 and len(frames[1].buffer) == request.length
    if not fits or (reply.version, reply.offset) != (request.version, request.offset):
        raise WeightsError(
            f"version {request.version}: a reply that was not asked for; nothing of it was applied"
        )
    arrived = np.frombuffer(frames[1].buffer, np.uint8)
    np.copyto(target[request.offset : request.offset + request.length], arrived)  # without the GIL
