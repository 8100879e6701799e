"""Replies kept for repeated parcels: the newest ones, bounded by count and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from slipstream.transport.base import Reply, frame_bytes

ReplyKey = tuple[bytes, str]
"""A sender and the id of its parcel: nobody gets an answer to what another has sent under the same id."""


class ReplyMemory:
    """A least-recently-used map from a sender's parcel to its reply; `bytes` counts keys, reasons and frames."""

    def __init__(self, count: int, max_bytes: int) -> None:
        self._count = count
        self._max_bytes = max_bytes
        self._replies: OrderedDict[ReplyKey, Reply] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, key: ReplyKey) -> Reply | None:
        """The reply to a parcel, if it is still remembered."""
        reply = self._replies.get(key)
        if reply is not None:
            self._replies.move_to_end(key)
        return reply

    def put(self, key: ReplyKey, reply: Reply) -> None:
        """Remember a reply and forget the oldest ones that no longer fit; an oversized one is not kept."""
        if _size(key, reply) > self._max_bytes:
            return
        self._replies[key] = reply
        self.bytes += _size(key, reply)
        while len(self._replies) > self._count or self.bytes > self._max_bytes:
            old_key, old = self._replies.popitem(last=False)
            self.bytes -= _size(old_key, old)


def _size(key: ReplyKey, reply: Reply) -> int:
    return len(key[0]) + len(key[1]) + len(reply.reason) + sum(map(frame_bytes, reply.frames))
