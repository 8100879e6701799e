"""Pull a version over UCX: post the buffer, then ask; a deadline for each chunk, and a sign of life meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from slipstream.errors import MessageError, TransportTimeout, WeightsError
from slipstream.transport.zeromq.watch import LinkWatch
from slipstream.weights.base import Bytes, Part
from slipstream.weights.links.control import Dial, dial, readable
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest, chunk_requests
from slipstream.weights.links.ucx.ucx_core import UcxCore
from slipstream.weights.links.ucx.ucx_wire import (
    BEAT_SECONDS,
    SCHEME,
    Asked,
    Beat,
    Bye,
    Hello,
    UcxFetch,
    UcxProblem,
    Welcome,
    decode_told,
    tag,
)
from slipstream.weights.manifest import Manifest

WINDOW = 4  # chunks under way
CANCEL_SECONDS = 5.0


class UcxPuller:
    """All of UCX happens on one thread of its own. The worker is made anew after a pull that failed."""

    scheme = "ucx"

    def __init__(self, options: Dial | None = None) -> None:
        self._dial = options or Dial()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-ucx")
        self._core: UcxCore | None = None
        self._closed = False

    def pull(
        self,
        manifest: Manifest,
        endpoint: str,
        part: Part,
        target: Bytes,
        start: int,
        filled: Callable[[int], None],
    ) -> None:
        """See `base.Puller`.

        Raises:
            UserError: UCXX is not installed.
        """
        requests = chunk_requests(manifest, part, len(target), start)
        self._thread.submit(self._pull, endpoint, requests, target, filled).result()

    def close(self) -> None:
        """End the worker and the thread; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._drop).result()
        self._thread.shutdown()
        self._context.destroy(linger=0)

    def _drop(self) -> None:
        self._core = None

    def _pull(
        self, endpoint: str, requests: list[ChunkRequest], target: Bytes, filled: Callable[[int], None]
    ) -> None:
        token, _, place = endpoint.removeprefix(SCHEME).partition("@")
        self._core = core = self._core or UcxCore()
        socket, watch = dial(self._context, f"tcp://{place}", self._dial)
        pull = _Pull(core, socket, watch, place, self._dial.frame_seconds)
        try:
            pull.open(token)
            pull.run(requests, target, filled)
        except BaseException:
            core.cancel(pull.posted(), CANCEL_SECONDS)
            self._core = None  # with its worker ends whatever UCX may still do to the buffers
            raise
        finally:
            pull.end()
            watch.close()
            socket.close(linger=100)


class _Pull:
    def __init__(
        self, core: UcxCore, socket: zmq.Socket[bytes], watch: LinkWatch, place: str, seconds: float
    ) -> None:
        self._core, self._socket, self._watch, self._place, self._seconds = core, socket, watch, place, seconds
        self._session = 0
        self._receiving: dict[int, Any] = {}
        self._beaten = time.monotonic()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(core.fd, zmq.POLLIN)

    def open(self, token: str) -> None:
        self._ask(Hello(token=token, address=self._core.address))
        self._wait(lambda: self._session != 0)

    def run(self, requests: list[ChunkRequest], target: Bytes, filled: Callable[[int], None]) -> None:
        for number in range(min(WINDOW, len(requests))):
            self._fetch(number, requests[number], target)
        for number, request in enumerate(requests):
            receiving = self._receiving[number]
            self._wait(lambda receiving=receiving: receiving.completed)  # type: ignore[misc]
            if problem := self._core.failed(receiving):
                raise TransportTimeout(f"weights from {self._place}: {problem}")
            del self._receiving[number]
            if number + WINDOW < len(requests):
                self._fetch(number + WINDOW, requests[number + WINDOW], target)
            filled(request.offset + request.length)

    def posted(self) -> list[Any]:
        """What UCX may still write to."""
        return list(self._receiving.values())

    def end(self) -> None:
        if self._session:
            self._ask(Bye(session=self._session))

    def _fetch(self, number: int, request: ChunkRequest, target: Bytes) -> None:
        place = target[request.offset : request.offset + request.length]
        self._receiving[number] = self._core.receive(place, tag(self._session, number))
        self._ask(UcxFetch(session=self._session, number=number, request=request))

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self._seconds
        while True:
            asleep = self._core.progress()
            if done():
                return
            if time.monotonic() > end:
                why = self._watch.look()
                raise TransportTimeout(
                    f"weights from ucx://{self._place}: nothing within {self._seconds:g} s"
                    + (why and f"; {why}")
                )
            if asleep:
                self._poller.poll(100)
            self._hear()
            if self._session and time.monotonic() - self._beaten > BEAT_SECONDS:
                self._ask(Beat(session=self._session))

    def _hear(self) -> None:
        while readable(self._socket):
            try:
                told = decode_told(self._socket.recv())
            except MessageError as error:
                raise WeightsError(str(error)) from error
            if isinstance(told, UcxProblem):
                raise WeightsError(told.problem)
            assert isinstance(told, Welcome)
            self._session = told.session

    def _ask(self, asked: Asked) -> None:
        self._beaten = time.monotonic()
        self._socket.send(msgspec.msgpack.encode(asked))
