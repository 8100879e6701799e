"""What became of a link, as far as libzmq tells: it drops one without a word to whoever waits on the socket."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the other side does not let this process's key in",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one of the two sides has a key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side has another key",
}
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSALS)


class LinkWatch:
    """Watches the one link of a connecting socket, in the socket's thread; made before it connects.

    Args:
        socket: The socket.
        limit: What its messages are limited to, bytes.
        setting: What a person would look at when the link is cut for a key.
    """

    def __init__(self, socket: zmq.Socket[Any], limit: int, setting: str = "network.keys") -> None:
        self.broken = 0
        self._limit, self._setting = limit, setting
        self._made = False
        self._refusal = ""
        self._socket = socket
        self.monitor = socket.get_monitor_socket(_EVENTS)

    def look(self) -> str:
        """Take in what happened; why the link is of no use, or an empty text."""
        while int(self.monitor.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            event = int(parse_monitor_message(self.monitor.recv_multipart())["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._made, self._refusal = True, ""
            elif event == zmq.EVENT_DISCONNECTED:
                self.broken += self._made
                self._made = False
            else:
                self._refusal = f"{_REFUSALS[zmq.Event(event)]} ({self._setting})"
        if self._refusal or not self.broken:
            return self._refusal
        times = "" if self.broken == 1 else f", {self.broken} times"
        return (
            f"the link was cut{times}: the other side ended it, or sent a message over the {self._limit} bytes "
            "that this side takes (MAXMSGSIZE, set by its frame size)"
        )

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
