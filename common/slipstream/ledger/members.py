"""Membership: who takes part, where, and at which version."""

from __future__ import annotations

import json
import logging
from types import NoneType
from typing import Any

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import Member, MemberInfo, pairs

log = logging.getLogger("slipstream.ledger")
_MOST_NAMED = 1000  # members whose nonsense is told once; beyond that they are passed over without a word


class MemberCalls(LedgerCalls):
    """Calls about members. What an expired or replaced member held goes back with a new attempt."""

    async def join(self, member: Member) -> None:
        """Join, or join again after an expiry; another incarnation under the same id replaces the former.

        Raises:
            FencedError: This incarnation was replaced and may not come back.
            LedgerError: Another member holds the buffer shard that this one says it is.
        """
        ttl_ms = round(member.ttl_s * 1000)
        await self._book.do("join", member.id, member.incarnation, ttl_ms, member.shard, member.fields())
        self._incarnations[member.id] = member.incarnation

    async def heartbeat(
        self, member_id: str, version: int | None = None, detail: dict[str, Any] | None = None
    ) -> None:
        """Extend the member's lease, and say which version it serves and what else others should see.

        Raises:
            MemberExpired: The lease ran out or the ledger forgot it; join again.
            FencedError: Another incarnation took its place; stop.
        """
        text = "" if detail is None else json.dumps(detail)
        served = -1 if version is None else version
        await self._book.do("heartbeat", member_id, self._incarnation(member_id), served, text)

    async def leave(self, member_id: str) -> None:
        """Leave in order: what it held goes back, without counting as a failed attempt."""
        await self._book.do("leave", member_id, self._incarnation(member_id))

    async def expire(self) -> None:
        """Return what expired members and late tickets hold; other calls do it on their way as well."""
        await self._book.do("expire")

    async def members(self, role: str | None = None) -> list[MemberInfo]:
        """The live members, of one role or of all, by id; one that announces nonsense is left out, with one line."""
        _, flat = await self._book.call_with_blobs(NoneType, "members")
        described = zip(flat[::2], flat[1::2], strict=True)
        found = [info for name, fields in described if (info := self._readable(name, fields)) is not None]
        return sorted((info for info in found if role in (None, info.role)), key=lambda info: info.id)

    def _readable(self, name: bytes, fields: bytes) -> MemberInfo | None:
        try:
            return _read(name, fields)
        except (msgspec.DecodeError, ValueError, KeyError, RecursionError) as error:
            if name not in self._unreadable and len(self._unreadable) < _MOST_NAMED:
                self._unreadable.add(name)
                log.warning("member %r announces nonsense and is left out: %s", name[:64], error)
            return None

    def _incarnation(self, member_id: str) -> str:
        return self._incarnations.get(member_id, "")


def _read(name: bytes, packed: bytes) -> MemberInfo:
    fields: dict[str, Any] = pairs(msgspec.msgpack.decode(packed, type=list[str]))
    fields |= {"id": name.decode(), "detail": json.loads(fields["detail"])}
    return msgspec.convert(fields, MemberInfo, strict=False)
