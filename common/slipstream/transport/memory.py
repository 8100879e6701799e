"""The in-process twin of the ZeroMQ queues: the same sender and receiver, joined by the event loop.

A `Hub` is the network. Messages arrive in order and never within the call that sent them, as with sockets.
Frames are handed over as they are; nobody changes a frame after sending it.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from slipstream.errors import UserError
from slipstream.protocol.messages import Frames
from slipstream.transport.base import Peer, ReceiverOptions, SenderOptions
from slipstream.transport.exchange import OnMessage
from slipstream.transport.guard import Guard
from slipstream.transport.link import OnMessage as OnDownward
from slipstream.transport.origin import Origin, new_identity
from slipstream.transport.receiver import QueueReceiver
from slipstream.transport.sender import QueueSender


class Hub:
    """A network inside one event loop: who listens where, and who is connected to whom."""

    def __init__(self) -> None:
        self.exchanges: dict[str, MemoryExchange] = {}
        self.lines: dict[bytes, MemoryLine] = {}
        self.numbers = itertools.count(1)

    def make_sender(self, options: SenderOptions) -> QueueSender:
        """A sender that reaches the receivers of this hub."""
        return QueueSender(options, MemoryDialer(self, options.origin))

    def make_receiver(self, options: ReceiverOptions) -> QueueReceiver:
        """A receiver on this hub; `options.port` 0 chooses a free number."""
        return QueueReceiver(options, MemoryExchange(self, options))


class MemoryLine:
    """One sender's connection to an endpoint; see `link.Line`."""

    def __init__(self, hub: Hub, endpoint: str, origin: Origin, on_message: OnDownward, guard: Guard) -> None:
        self.identity = new_identity(origin)
        self.endpoint = endpoint
        self._hub = hub
        self._on_message = on_message
        self._guard = guard
        hub.lines[self.identity] = self
        self.greet()

    def greet(self) -> None:
        """Tell the other side, if it is there, that a connection was made."""
        self.send([b""])

    def send(self, frames: Frames) -> bool:
        """Queue a message; False when nobody listens there."""
        self._guard.check_thread()
        exchange = self._hub.exchanges.get(self.endpoint)
        if exchange is None:
            return False
        asyncio.get_running_loop().call_soon(exchange.take, self.identity, frames)
        return True

    def take(self, frames: Frames) -> None:
        """Hand a message to the sender."""
        if self.identity in self._hub.lines:
            _hand_over(self._guard, partial(self._on_message, list(frames)))

    def trouble(self) -> str:
        """Nothing cuts it."""
        return ""

    def close(self) -> None:
        """Disconnect."""
        self._guard.check_thread()
        self._hub.lines.pop(self.identity, None)


class MemoryDialer:
    """Makes lines on a hub; see `link.Dialer`."""

    def __init__(self, hub: Hub, origin: Origin) -> None:
        self._hub = hub
        self._origin = origin

    def open(self, guard: Guard) -> None:
        """Nothing to open."""
        self._guard = guard

    def dial(self, peer: Peer, on_message: OnDownward) -> MemoryLine:
        """A line to the peer's endpoint, whether or not anybody listens there yet."""
        if not peer.endpoint.startswith("memory://"):
            raise UserError(f"endpoint {peer.endpoint!r}: not in this process", "use memory://HOST:PORT")
        return MemoryLine(self._hub, peer.endpoint, self._origin, on_message, self._guard)

    async def close(self) -> None:
        """Nothing to close; the lines are closed already."""


class MemoryExchange:
    """The listening side on a hub; see `receiver.Exchange`."""

    denied = 0

    def __init__(self, hub: Hub, options: ReceiverOptions) -> None:
        self._hub = hub
        self._options = options
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Where senders connect to."""
        return self._endpoint

    def open(self, guard: Guard, on_message: OnMessage) -> None:
        """Listen; raises `UserError` when the port is taken."""
        host, port, setting = self._options.host, self._options.port, self._options.setting
        endpoint = f"memory://{self._options.advertise or host}:{port or next(self._hub.numbers)}"
        if endpoint in self._hub.exchanges:
            mend = f"free the port, or set {setting} to 0 to let the system choose"
            raise UserError(f"{setting}: cannot listen on port {port} of {host}: in use", mend)
        self._guard, self._on_message, self._endpoint = guard, on_message, endpoint
        self._hub.exchanges[endpoint] = self
        for line in list(self._hub.lines.values()):
            if line.endpoint == endpoint:
                line.greet()

    def send(self, to: bytes, frames: Frames) -> bool:
        """Queue a message to a sender; False when it is gone."""
        self._guard.check_thread()
        line = self._hub.lines.get(to)
        if line is None:
            return False
        asyncio.get_running_loop().call_soon(line.take, frames)
        return True

    def take(self, sender: bytes, frames: Frames) -> None:
        """Hand a message to the receiver."""
        if self._hub.exchanges.get(self._endpoint) is self:
            _hand_over(self._guard, partial(self._on_message, sender, list(frames)))

    async def close(self) -> None:
        """Stop listening."""
        del self._hub.exchanges[self._endpoint]


def _hand_over(guard: Guard, call: partial[None]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (called by the loop, so nobody else would see it)
        guard.fail(error)
