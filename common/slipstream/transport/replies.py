"""Replies kept for repeated parcels: the newest ones, bounded by count and by bytes."""

from __future__ import annotations

from collections import OrderedDict

from slipstream.transport.base import Reply, frame_bytes


class ReplyMemory:
    """A least-recently-used map from parcel id to reply; `bytes` counts ids, reasons and frames."""

    def __init__(self, count: int, max_bytes: int) -> None:
        self._count = count
        self._max_bytes = max_bytes
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, parcel_id: str) -> Reply | None:
        """The reply to a parcel, if it is still remembered."""
        reply = self._replies.get(parcel_id)
        if reply is not None:
            self._replies.move_to_end(parcel_id)
        return reply

    def put(self, parcel_id: str, reply: Reply) -> None:
        """Remember a reply and forget the oldest ones that no longer fit; an oversized one is not kept."""
        if _size(parcel_id, reply) > self._max_bytes:
            return
        self._replies[parcel_id] = reply
        self.bytes += _size(parcel_id, reply)
        while len(self._replies) > self._count or self.bytes > self._max_bytes:
            old_id, old = self._replies.popitem(last=False)
            self.bytes -= _size(old_id, old)


def _size(parcel_id: str, reply: Reply) -> int:
    return len(parcel_id) + len(reply.reason) + sum(map(frame_bytes, reply.frames))
