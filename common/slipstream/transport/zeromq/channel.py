"""A ZeroMQ socket in an event loop: messages come by callback, sends never wait.

libzmq's file descriptor is edge-triggered and speaks for both directions: after any send or receive there may
be input that will raise no further event. So each wake-up reads until nothing is left, and each send looks.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from slipstream.protocol.messages import Frame, Frames
from slipstream.transport.guard import Guard
from slipstream.transport.zeromq.door import Door
from slipstream.transport.zeromq.watch import LinkWatch

BATCH = 100
COPY_BELOW = 8 << 10
"""Bytes under which a copy is cheaper than keeping libzmq's buffer alive."""


class Channel:
    """Owns a socket until `close`; an error in the callback is the death of the guard's owner."""

    def __init__(
        self,
        socket: zmq.SyncSocket,
        on_message: Callable[[list[Frame]], None],
        guard: Guard,
        watch: LinkWatch | None = None,
        door: Door | None = None,
    ) -> None:
        self._socket = socket
        self._watch = watch
        self._door = door
        self._on_message = on_message
        self._guard = guard
        self._fd = int(socket.getsockopt(zmq.FD))
        self._woken = False
        guard.loop.add_reader(self._fd, self._read)
        self._wake()

    def send(self, frames: Frames) -> bool:
        """Queue a message; False when there is no connection, no such peer, or no room."""
        self._guard.check_thread()
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()
        return True

    def trouble(self) -> str:
        """Why the one link of a connecting socket was cut or is not let in, or an empty text."""
        return self._watch.look() if self._watch is not None and not self._socket.closed else ""

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is queued is sent for at most `linger_ms`."""
        self._guard.check_thread()
        if not self._socket.closed:
            self._guard.loop.remove_reader(self._fd)
            if self._watch is not None:
                self._watch.close()
            if self._door is not None:
                self._door.close()
            self._socket.close(linger=linger_ms)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._guard.loop.call_soon(self._read)

    def _read(self) -> None:
        self._woken = False
        try:
            for _ in range(BATCH):
                if self._socket.closed:
                    return
                self._on_message([_unwrap(frame) for frame in self._receive()])
        except zmq.Again:
            return
        except Exception as error:  # noqa: BLE001  (called by the loop, so nobody else would see it)
            self._guard.fail(error)
            return
        self._wake()

    def _receive(self) -> list[zmq.Frame]:
        frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        if self._door is not None:
            self._door.heard(frames[-1])
        return frames


def _unwrap(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) < COPY_BELOW else frame.buffer
