"""Serve a shelf over UCX: one thread with a control socket and a UCX worker, both asleep when nothing happens.

UCX never says that a receiver is stopped, so each send has a deadline and each receiver has to say that it lives.
One that fails either is aborted: its endpoint is closed, and its buffers are kept until UCX has let go of them.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from slipstream.errors import MessageError, SlipstreamError, TransportTimeout, UserError, WeightsError
from slipstream.weights.base import Bytes
from slipstream.weights.links.control import Gate, ServerOptions, readable
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.ucx.ucx_core import UcxCore
from slipstream.weights.links.ucx.ucx_trial import AddressTrials
from slipstream.weights.links.ucx.ucx_wire import (
    SILENT_SECONDS,
    Bye,
    Hello,
    Told,
    UcxFetch,
    UcxProblem,
    Welcome,
    decode_asked,
    tag,
)

POLL_MS = 100
SOON_MS = 5
START_SECONDS = 120.0  # importing UCXX alone takes seconds on a busy machine
END_SECONDS = 5.0
MOST_SESSIONS = 64
MOST_WAITING = 16  # requests of one session


@dataclass(slots=True, eq=False)
class _Send:
    request: Any
    data: Bytes  # UCX reads it until the request is completed
    deadline: float


@dataclass(slots=True, eq=False)
class _Session:
    number: int
    endpoint: Any
    heard: float
    waiting: list[tuple[UcxFetch, float]] = field(default_factory=list)
    sends: list[_Send] = field(default_factory=list)


class UcxServer:
    """A thread that serves until it is closed. `aborted` counts receivers that were given up.

    Raises:
        UserError: UCXX is not installed, or the port is taken.
    """

    scheme = "ucx"

    def __init__(self, shelf: Shelf, options: ServerOptions, send_seconds: float = 10.0) -> None:
        self.aborted = self.refused = 0
        self._shelf, self._send_seconds = shelf, send_seconds
        self._token = secrets.token_hex(16)
        self._sessions: dict[bytes, _Session] = {}
        self._arrivals: dict[bytes, Hello] = {}
        self._dying: list[_Session] = []
        self._stopping, self._started = threading.Event(), threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._trials = AddressTrials()
        self._error: BaseException | None = None
        try:
            self._gate = Gate(self._context, options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        try:
            self._router = self._gate.router
            self._thread = threading.Thread(target=self._run, name="weights-ucx", daemon=True)
            self._thread.start()
            self._await_start()
        except BaseException:
            self._close()
            raise
        self.endpoint = f"ucx://{self._token}@{self._gate.place}"

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; receivers meet their deadline. Harmless when repeated."""
        self._stopping.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._trials.close()
        self._gate.close()
        self._context.destroy(linger=0)

    def _await_start(self) -> None:
        if not self._started.wait(START_SECONDS):
            raise UserError(
                f"ucx did not start within {START_SECONDS:g} s", "see UCX_LOG_LEVEL=info, or use tcp"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            core = UcxCore()
        except Exception as error:  # noqa: BLE001 - the thread's outer edge: the constructor raises it
            self._error = (
                error if isinstance(error, SlipstreamError) else UserError(f"ucx cannot start: {error}")
            )
            self._started.set()
            return
        self._started.set()
        poller = zmq.Poller()
        self._gate.register(poller)
        poller.register(core.fd, zmq.POLLIN)
        while not self._stopping.is_set():
            if core.progress():
                poller.poll(SOON_MS if any(each.waiting for each in self._sessions.values()) else POLL_MS)
            self._gate.admit()
            while readable(self._router):
                self._take(core, self._gate.take())
            self._tend(core)
        self._end(core)

    def _end(self, core: UcxCore) -> None:
        """Close what is open while the worker still moves: an endpoint that outlives it hangs the process's end."""
        for who in list(self._sessions):
            self._abort(who)
        core.cancel([send.request for session in self._dying for send in session.sends], END_SECONDS)
        end = time.monotonic() + END_SECONDS
        while any(session.endpoint.alive for session in self._dying) and time.monotonic() < end:
            core.progress()
            time.sleep(0.001)
        self._dying.clear()

    def _take(self, core: UcxCore, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise MessageError("not a request")
            asked = decode_asked(frames[1])
            if isinstance(asked, Hello):
                self._note(frames[0], asked)
                return
            session = self._sessions.get(frames[0])
            if session is None or session.number != asked.session:
                raise MessageError("no such session")
        except MessageError:
            self.refused += 1
            return
        session.heard = time.monotonic()
        if isinstance(asked, UcxFetch) and len(session.waiting) + len(session.sends) < MOST_WAITING:
            session.waiting.append((asked, self._shelf.until()))
        elif isinstance(asked, UcxFetch):
            self._end_session(frames[0], f"over {MOST_WAITING} requests at once")
        elif isinstance(asked, Bye):
            self._abort(frames[0])

    def _note(self, who: bytes, hello: Hello) -> None:
        """Take a newcomer in whose address is to be tried, if it has the token."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise MessageError("another token")
        known = self._sessions.keys() | self._arrivals.keys()
        if len(known) >= MOST_SESSIONS or who in known:
            raise MessageError("too many sessions")
        self._arrivals[who] = hello

    def _greet(self, core: UcxCore, who: bytes, hello: Hello) -> None:
        try:
            if (usable := self._trials.verdict(hello.address)) is None:
                return
            del self._arrivals[who]
            if not usable:
                raise TransportTimeout("ucx: the receiver's address is damaged, or of another build of UCX")
            endpoint = core.connect(hello.address)
        except TransportTimeout as error:
            self._arrivals.pop(who, None)
            self.refused += 1
            self._tell(who, UcxProblem(problem=str(error)))
            return
        session = _Session(secrets.randbits(31) | 1, endpoint, time.monotonic())
        self._sessions[who] = session
        self._tell(who, Welcome(session=session.number))

    def _tend(self, core: UcxCore) -> None:
        """Begin sends, forget those that are complete, and abort whoever is late or silent."""
        for who, hello in list(self._arrivals.items()):
            self._greet(core, who, hello)
        now = time.monotonic()
        for who, session in list(self._sessions.items()):
            broken = any(core.failed(send.request) for send in session.sends if send.request.completed)
            session.sends = [send for send in session.sends if not send.request.completed]
            late = any(send.deadline < now for send in session.sends)
            if broken or late or session.heard < now - SILENT_SECONDS or not session.endpoint.alive:
                self.aborted += 1
                self._abort(who)
                continue
            waiting, session.waiting = session.waiting, []
            try:
                for fetch, until in waiting:
                    self._begin(core, who, session, fetch, until)
            except TransportTimeout as error:
                self._end_session(who, str(error))
        for session in self._dying:
            session.sends = [send for send in session.sends if not send.request.completed]
        gone = now - END_SECONDS
        self._dying = [
            each for each in self._dying if each.sends or (each.endpoint.alive and each.heard > gone)
        ]

    def _begin(self, core: UcxCore, who: bytes, session: _Session, fetch: UcxFetch, until: float) -> None:
        try:
            chunk = self._shelf.chunk(fetch.request, until)
        except WeightsError as error:
            self._tell(who, UcxProblem(problem=str(error)))
            return
        if chunk is None:
            session.waiting.append((fetch, until))
            return
        request = core.send(session.endpoint, chunk, tag(session.number, fetch.number))
        session.sends.append(_Send(request, chunk, time.monotonic() + self._send_seconds))

    def _end_session(self, who: bytes, problem: str) -> None:
        self.refused += 1
        self._tell(who, UcxProblem(problem=problem))
        self._abort(who)

    def _abort(self, who: bytes) -> None:
        """Close without waiting; what UCX may still read stays until it says that it does not."""
        session = self._sessions.pop(who)
        session.heard = time.monotonic()
        if session.endpoint.alive:  # UCX closes one that failed by itself, and a second close is a crash
            session.endpoint.close()
        self._dying.append(session)

    def _tell(self, who: bytes, told: Told) -> None:
        try:
            self._router.send_multipart([who, msgspec.msgpack.encode(told)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
