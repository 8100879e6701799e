"""A learner's step as a transaction: take → train → commit, and what a checkpoint makes durable."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import Aside, Folded, RunState, Standing, State, Taken, check_reason, pairs
from slipstream.ledger.runs import StateReply

_AT_ONCE = 1000


class _FoldedReply(msgspec.Struct, frozen=True, array_like=True):
    cursor: int
    tickets: list[int]


class _StoredReply(msgspec.Struct, frozen=True, array_like=True):
    last: int
    seen: int
    found: list[Standing]


class _MakersReply(msgspec.Struct, frozen=True, array_like=True):
    flat: list[str]


class StepCalls(LedgerCalls):
    """Calls of the learner. `learner` is its incarnation: only the newest that claimed the run is heard, any
    other gets FencedError.
    """

    async def claim_learner(self, learner: str) -> RunState:
        """Take the run over; an earlier learner is refused from now on, and cannot claim it back."""
        return (await self._book.call(StateReply, "claim_learner", learner)).read()

    async def take(self, step: int, tickets: Sequence[tuple[int, int]], learner: str) -> Taken:
        """Bind stored groups to the next step (buffered → taken); may be called several times for one step.

        Args:
            step: The run's step + 1.
            tickets: (number, attempt) of each group.
            learner: The learner's incarnation.
        """
        return await self._book.call(Taken, "take", step, list(tickets), learner)

    async def taken(self, step: int) -> list[int]:
        """Tickets of a step that is taken or trained and not yet folded."""
        return await self._book.call(list[int], "taken", step)

    async def states(self, tickets: Sequence[int]) -> dict[int, State]:
        """State of each ticket that has a record; those that are missing are folded."""
        found: dict[int, State] = {}
        for start in range(0, len(tickets), _AT_ONCE):
            batch = list(tickets[start : start + _AT_ONCE])
            facts = await self._book.call(list[tuple[int, int, State]], "states", batch)
            found |= {number: state for number, _, state in facts}
        return found

    async def attempts(self, tickets: Sequence[int]) -> dict[int, int]:
        """Attempt that each ticket is at, of those that have a record."""
        facts = await self._book.call(list[tuple[int, int, State]], "states", list(tickets))
        return {number: attempt for number, attempt, _ in facts}

    async def stored(self) -> list[tuple[int, int, str]]:
        """(number, attempt, shard) of every group that should lie in a buffer, free to be taken."""
        return [(e.number, e.attempt, e.shard) for e in await self.standing() if e.state == "buffered"]

    async def standing(self) -> list[Standing]:
        """Every group that is on its way to a buffer, or lies in one."""
        found: list[Standing] = []
        after, seen = -1, _AT_ONCE
        while seen == _AT_ONCE:
            reply = await self._book.call(_StoredReply, "stored", after, _AT_ONCE)
            after, seen = reply.last, reply.seen
            found += reply.found
        return found

    async def give_back(self, shard: str, tickets: Sequence[tuple[int, int]]) -> list[int]:
        """Have lost groups rolled out anew: their shard no longer holds them (buffered → issued).

        Returns those that were given back; taken groups, and those stored again since, are not.
        """
        return await self._book.call(list[int], "give_back", shard, list(tickets), "buffered")

    async def mislaid(self, tickets: Sequence[tuple[int, int]]) -> list[int]:
        """Have groups rolled out anew that were scored and came to no shard (scored → issued); returns them."""
        return await self._book.call(list[int], "give_back", "", list(tickets), "scored")

    async def untake(self, step: int, learner: str) -> None:
        """Give back what was taken for a step that is not committed."""
        await self._book.do("untake", step, learner)

    async def set_aside(self, step: int, learner: str, groups: Sequence[Aside]) -> None:
        """A batch that makes no step: the named groups leave it, and the others are free again, in one instant.

        One that had gone before is passed over, so that the call can be repeated.
        """
        facts = [
            (each.number, each.attempt, check_reason(each.reason), 2 if each.failed else int(each.again))
            for each in groups
        ]
        await self._book.do("set_aside", step, learner, facts)

    async def commit(
        self,
        step: int,
        version: int,
        learner: str,
        tickets: Sequence[tuple[int, int]] = (),
        idle: Sequence[tuple[int, int, str]] = (),
    ) -> RunState:
        """The step is done: its groups are trained, step and version advance, in one instant.

        Args:
            step: The run's step + 1.
            version: The run's + 1: what makes no new weights is no step.
            learner: The learner's incarnation.
            tickets: (number, attempt) of what was trained; whatever else the step had taken goes back. Without
                them the step trained all that it has taken.
            idle: (number, attempt, reason) of groups of the batch that had no part in an update: they are dropped.
        """
        facts = [(number, attempt, check_reason(reason)) for number, attempt, reason in idle]
        reply = await self._book.call(StateReply, "commit", step, version, learner, list(tickets), facts)
        return reply.read()

    async def advance_version(self, version: int, learner: str) -> None:
        """Set a higher version without a step: weights that a restarted learner publishes anew."""
        await self._book.do("advance_version", version, learner)

    async def makers(self) -> dict[int, str]:
        """Which learner made each step of the line of descent, from the durable one on; empty in an empty ledger."""
        reply = await self._book.call(_MakersReply, "makers")
        return {int(step): learner for step, learner in pairs(reply.flat).items()}

    async def durable(self, step: int, learner: str) -> None:
        """A checkpoint covers everything up to `step`: fold those records away."""
        await self._book.do("durable", step, learner)

    async def rollback(self, step: int, version: int, learner: str, told: int = 0) -> RunState:
        """The learner restarted from a checkpoint of `step` and `version`: later steps are undone.

        `told` is the newest version that the run's own files name. A ledger that was restored, or whose server
        lost its last writes, may be behind it; no version is ever used twice.

        Their groups are buffered again. The run's version stays, since versions only grow; those after
        `version` are noted as lost. To be called after `claim_learner` and before the first commit.
        """
        return (await self._book.call(StateReply, "rollback", step, version, learner, told)).read()

    async def folded(self, since: int = 0) -> Folded:
        """Tickets closed for good since `since`, the cursor of the former call (0: all that are listed).

        A caller that is far behind gets all tickets ever folded.
        """
        reply, bitmaps = await self._book.call_with_blobs(_FoldedReply, "folded", since)
        numbers = _numbers(bitmaps) if bitmaps else np.unique(np.asarray(reply.tickets, dtype=np.int64))
        return Folded(reply.cursor, _ranges(numbers))

    async def announce(self, version: int, manifest: bytes, learner: str) -> None:
        """Publish where the weights of a committed version are; a smaller version is refused."""
        await self._book.do("announce", version, learner, blobs=(manifest,))

    async def manifest(self, newer_than: int = -1) -> tuple[int, bytes] | None:
        """The newest announced version and its manifest, if it is newer than that."""
        version, found = await self._book.call_with_blobs(int, "manifest", newer_than)
        return (version, found[0]) if found else None


def _numbers(bitmaps: list[bytes]) -> npt.NDArray[np.int64]:
    length = max(len(bitmap) for bitmap in bitmaps)
    union = np.zeros(length, dtype=np.uint8)
    for bitmap in bitmaps:
        union[: len(bitmap)] |= np.frombuffer(bitmap, dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(union)).astype(np.int64)


def _ranges(numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Inclusive ranges of sorted distinct numbers."""
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) > 1)
    firsts = numbers[np.concatenate(([0], breaks + 1))]
    lasts = numbers[np.concatenate((breaks, [len(numbers) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
