"""Evaluation jobs: items handed to replicas, all of one job answered by one version."""

from __future__ import annotations

from types import NoneType

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import EvalClaim, EvalStatus


class _Grant(msgspec.Struct, frozen=True, array_like=True):
    number: int
    job: str
    version: int
    items: list[int]


class EvalCalls(LedgerCalls):
    """Calls about evaluations."""

    async def open_eval(self, job: str, items: int, min_version: int, deadline_s: float) -> None:
        """Offer items 0 … `items` − 1 to replicas that serve `min_version` or newer, for `deadline_s`."""
        await self._book.do("open_eval", job, items, min_version, round(deadline_s * 1000))

    async def claim_eval(self, owner: str, count: int, served_version: int) -> EvalClaim | None:
        """Up to `count` items of one job to run at `served_version`, or None.

        The first claim pins the job to the claimant's version; when no live replica serves that any more, the
        job begins again at the next claimant's. Keep serving the version until the results are reported.
        """
        async with self._one_claim[owner]:
            incarnation, seen = self._incarnations.get(owner, ""), self._eval_grants.get(owner, 0)
            grant, _ = await self._book.call_numbered(
                _Grant, "claim_eval", owner, incarnation, count, served_version, seen
            )
            self._eval_grants[owner] = grant.number
        return EvalClaim(grant.job, grant.version, grant.items) if grant.items else None

    async def report_eval(self, job: str, item: int, owner: str, version: int, result: bytes) -> bool:
        """Give the result of an item that `owner` has claimed, made at `version`.

        Returns:
            Whether it counts: the first one does.

        Raises:
            FencedError: The job is closed, or began again at another version, or the item is another member's.
        """
        return await self._book.call(bool, "report_eval", job, item, owner, version, blobs=(result,))

    async def eval_status(self, job: str) -> EvalStatus:
        """How far the job is."""
        return await self._book.call(EvalStatus, "eval_status", job)

    async def eval_results(self, job: str) -> dict[int, bytes]:
        """The results so far by item."""
        _, flat = await self._book.call_with_blobs(NoneType, "eval_results", job)
        return {int(item): result for item, result in zip(flat[::2], flat[1::2], strict=True)}

    async def close_eval(self, job: str) -> None:
        """Forget the job and its results; later reports are refused."""
        await self._book.do("close_eval", job)
