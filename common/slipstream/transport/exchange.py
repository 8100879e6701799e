"""What a receiver asks of the medium below it."""

from __future__ import annotations

from typing import Protocol

from slipstream.protocol.messages import Frame, Frames
from slipstream.transport.guard import Guard


class OnMessage(Protocol):
    """What is done with a message that arrived."""

    def __call__(self, sender: bytes, frames: list[Frame]) -> None: ...


class Exchange(Protocol):
    """The medium; opened and closed with its receiver."""

    @property
    def endpoint(self) -> str: ...

    @property
    def denied(self) -> int: ...

    def open(self, guard: Guard, on_message: OnMessage) -> None:
        """Bind; raises `UserError` naming port and setting when the port is taken."""
        ...

    def send(self, to: bytes, frames: Frames) -> bool:
        """Queue a message without waiting; False when the sender is gone or has no room."""
        ...

    async def close(self) -> None: ...
