from __future__ import annotations

import pytest

from slipstream.errors import FencedError


async def test_a_prompt_that_wedges_is_given_up_also_across_a_resume(ledger, connect, terms, replica, clock):
    """Case 77: what it has cost before the restart counts, and it is not issued again after it."""
    run = terms(end_ticket=2, max_attempts=3, ticket_deadline_s=60.0)
    await ledger.open_run(run)

    async def roll(book) -> list[tuple[int, int]]:
        await book.join(replica())
        return [(ticket.number, ticket.attempt) for ticket in await book.admit("g0", 9, 0)]

    assert await roll(ledger) == [(0, 0), (1, 0)]
    await ledger.buffered(1, 0, "g0", "0", 0, 0, 5, True)
    clock.advance(61)
    assert await roll(ledger) == [(0, 1)]
    clock.advance(61)
    await ledger.expire()
    heir = await connect("-restored")
    await heir.restore(await ledger.snapshot())
    await heir.open_run(run)
    ((number, attempt),) = await roll(heir)
    assert number == 0
    clock.advance(61)
    assert await roll(heir) == []
    counts = await heir.counts()
    assert sum(counts.failed.values()) == 1
    assert await heir.end_of_data()
    with pytest.raises(FencedError):
        await heir.buffered(0, attempt, "g0", "0", 0, 0, 5, True)
