"""How large a message of a ZeroMQ socket may be, so that nothing is cut off that its own protocol allows.

libzmq compares its limit with what comes over the wire, and CURVE makes each frame 33 bytes longer there. It drops
a link on which a longer message comes, in silence, and does so again after each reconnect.
"""

from __future__ import annotations

from typing import Any

import zmq

SLACK_BYTES = 4 << 10
"""Room for what a mechanism adds to each frame."""


def bound_messages(socket: zmq.Socket[Any], frame_bytes: int) -> int:
    """Limit what a socket takes in to frames of so many bytes, keyed or not; returns the limit on the wire, bytes."""
    limit = frame_bytes + SLACK_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    return limit
