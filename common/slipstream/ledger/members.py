"""Membership: who takes part, where, and at which version."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import Member, MemberInfo, pairs


class _Members(msgspec.Struct, frozen=True, array_like=True):
    """The fields of each live member, in turn."""

    found: list[list[str]]


class MemberCalls(LedgerCalls):
    """Calls about members. What an expired or replaced member held goes back with a new attempt."""

    async def join(self, member: Member) -> None:
        """Join, or join again after an expiry; another incarnation under the same id replaces the former.

        Raises:
            FencedError: This incarnation was replaced and may not come back.
        """
        ttl_ms = round(member.ttl_s * 1000)
        await self._book.do("join", member.id, member.incarnation, ttl_ms, member.fields())
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
        """The live members, of one role or of all, by id."""
        reply = await self._book.call(_Members, "members")
        found = [_read(flat) for flat in reply.found]
        return sorted((info for info in found if role in (None, info.role)), key=lambda info: info.id)

    def _incarnation(self, member_id: str) -> str:
        return self._incarnations.get(member_id, "")


def _read(flat: list[str]) -> MemberInfo:
    fields: dict[str, Any] = pairs(flat)
    fields["detail"] = json.loads(fields["detail"])
    return msgspec.convert(fields, MemberInfo, strict=False)
