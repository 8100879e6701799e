"""Who sends: a connection greets with the member that it belongs to, and the receiver remembers by that.

The identity of a socket travels in ZeroMQ's own handshake, so that no message has to repeat it. The run's key says
only that somebody belongs to the run; which member it is, the receiver's service compares with the ledger.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_MARK = b"m"
_NOBODY = b"s"
_RANDOM = 12
_LONGEST = 255  # what ZeroMQ allows an identity


@dataclass(frozen=True, slots=True)
class Origin:
    """A member's id and its incarnation; both empty for one that does not say."""

    member: str = ""
    incarnation: str = ""


def new_identity(origin: Origin) -> bytes:
    """An identity for one connection of a member; it begins with who it is, and nobody else can guess the rest."""
    said = f"{origin.member}/{origin.incarnation}/".encode()
    if not origin.member or len(said) + _RANDOM >= _LONGEST:
        return _NOBODY + secrets.token_bytes(_RANDOM)
    return _MARK + said + secrets.token_bytes(_RANDOM)


def origin_of(identity: bytes) -> Origin:
    """Who a connection says it is."""
    parts = identity[1:-_RANDOM].split(b"/")
    if not identity.startswith(_MARK) or len(parts) != 3 or not parts[0] or parts[2]:
        return Origin()
    try:
        return Origin(parts[0].decode(), parts[1].decode())
    except UnicodeDecodeError:
        return Origin()


def sender_of(identity: bytes) -> bytes:
    """By what a receiver remembers a sender: the same over all of its connections; one that is nobody is its line."""
    return identity[:-_RANDOM] if origin_of(identity).member else identity
