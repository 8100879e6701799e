"""Who is connected to a listening ZeroMQ socket: libzmq accepts without limit, and tells nobody who says nothing.

A thread follows the socket's monitor, so that a busy event loop does not leave the door open. A connection of which
no message has come is *silent*: when there are too many, the oldest go; when there are too many in all, those that
have been silent the longest. Peers of the run connect again by themselves, and lose nothing.
"""

from __future__ import annotations

import contextlib
import logging
import socket as sockets
import struct
import threading
import time
from typing import Any

import zmq

from slipstream.lifecycle.descriptors import cut, most_peers, most_silent

log = logging.getLogger("slipstream.transport")
HANDSHAKE_MS = 10_000
BACKLOG = 128
BATCH = 256
QUIET_SECONDS = 60.0  # between two lines on the same thing
_EVENT = struct.Struct("=HI")
_EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Door:
    """Made before the socket binds, by its thread; closed by it before the socket is.

    Args:
        socket: A listening socket.
        listener: What the connections that are closed are counted under.
    """

    def __init__(self, socket: zmq.Socket[Any], listener: str) -> None:
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket, self._listener = socket, listener
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._accepted: dict[int, float] = {}  # descriptor: when, the oldest first
        self._heard: dict[int, float] = {}
        self._port = 0
        self._spoke = -QUIET_SECONDS
        self._thread = threading.Thread(target=self._watch, name=f"door-{listener}", daemon=True)
        self._thread.start()

    def heard(self, frame: zmq.Frame) -> None:
        """A message has come; `frame` is one of its frames."""
        with contextlib.suppress(zmq.ZMQError):  # a peer that speaks ZMTP 1 has no descriptor, and stays silent
            self._heard[int(frame.get(zmq.SRCFD))] = time.monotonic()

    def close(self) -> None:
        """Stop watching; harmless when repeated."""
        if self._thread.is_alive():
            self._socket.disable_monitor()
            self._thread.join()

    def _watch(self) -> None:
        try:
            while True:
                self._monitor.poll()
                crowded = False
                for _ in range(BATCH):
                    event = self._next()
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        return
                    crowded |= event == zmq.EVENT_ACCEPT_FAILED
                    if not event:
                        break
                self._make_room(0 if crowded else most_silent())
        finally:
            self._monitor.close(linger=0)

    def _next(self) -> int:
        """Take in the next event; 0 if there is none."""
        try:
            head, place = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return 0
        event, descriptor = _EVENT.unpack(head)
        if event == zmq.EVENT_LISTENING:
            self._port = int(place.rpartition(b":")[2])
        elif event == zmq.EVENT_ACCEPTED:
            self._accepted.pop(descriptor, None)
            self._accepted[descriptor] = time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(descriptor)
        return int(event)

    def _make_room(self, silent_allowed: int) -> None:
        silent = [descriptor for descriptor in self._accepted if descriptor not in self._heard]
        leaving = silent[: max(0, len(silent) - silent_allowed)]
        over = len(self._accepted) - len(leaving) - most_peers()
        if over > 0:
            staying = [each for each in self._accepted if each not in set(leaving)]
            leaving += sorted(staying, key=lambda each: self._heard.get(each, 0.0))[:over]
        for descriptor in leaving:
            self._forget(descriptor)
            _hang_up(descriptor, self._port)
        cut[self._listener] += len(leaving)
        if leaving and time.monotonic() > self._spoke + QUIET_SECONDS:
            self._spoke = time.monotonic()
            log.warning(
                "port %d (%s): too many connections that say nothing; the oldest are closed, %d so far",
                self._port,
                self._listener,
                cut[self._listener],
            )

    def _forget(self, descriptor: int) -> None:
        self._accepted.pop(descriptor, None)
        self._heard.pop(descriptor, None)


def _hang_up(descriptor: int, port: int) -> None:
    """End a connection that libzmq owns, which then closes it; nothing happens to one of another port."""
    with contextlib.suppress(OSError):  # closed meanwhile
        link = sockets.socket(fileno=descriptor)
        try:
            if link.getsockname()[1] == port:
                link.shutdown(sockets.SHUT_RDWR)
        finally:
            link.detach()
