"""Out of order within a window: prompts that ran long before go first, and each is still issued once."""

from __future__ import annotations

import random

import pytest

from slipstream.ledger.tickets import length_code
from slipstream.prompts.order import EpochOrder


async def test_long_prompts_of_the_window_go_first_and_nobody_waits_for_ever(ledger, terms, replica):
    await ledger.open_run(terms(prompts=10, window=4, groups_per_step=50))
    await ledger.join(replica())
    await ledger.admit("g0", 10, 0)
    lengths = [(10 + place, tokens) for place, tokens in enumerate([1, 5, 9, 2, 90, 80, 70, 60, 50, 40])]
    given = await ledger.admit("g0", 1, 0, lengths=lengths)
    given += await ledger.admit("g0", 2, 0)
    assert [ticket.number - 10 for ticket in given] == [2, 1, 3]
    rest = [ticket.number - 10 for _ in range(7) for ticket in await ledger.admit("g0", 1, 0)]
    assert rest == [0, 4, 5, 6, 7, 8, 9]
    assert (await ledger.audit()).problems == []


@pytest.mark.parametrize("seed", range(3))
async def test_each_prompt_is_issued_once_an_epoch_also_across_a_restore(ledger, connect, terms, replica, seed):
    """Cases 83 and 84, with an order that changes: no repeat inside an epoch, 20 of the third for 120."""
    draw = random.Random(seed)
    run = terms(prompts=50, window=16, end_ticket=120, groups_per_step=400)
    await ledger.open_run(run)
    await ledger.join(replica())
    order, issued = EpochOrder(50, seed), []

    async def take(book, count):
        lengths = [(draw.randrange(150), draw.randrange(999)) for _ in range(3)]
        issued.extend(ticket.number for ticket in await book.admit("g0", count, 0, lengths=lengths))

    while len(issued) < 60:
        await take(ledger, draw.randrange(1, 9))
    assert issued != sorted(issued)
    heir = await connect("-restored")
    await heir.restore(await ledger.snapshot())
    await heir.open_run(run)
    await heir.join(replica())
    before, issued = sorted(issued), []
    while len(issued) < 120:  # those on their way come again
        await take(heir, draw.randrange(1, 9))
        assert await heir.end_of_data() is False
    assert sorted(issued) == list(range(120))
    assert sorted(issued)[: len(before)] != before or before == list(range(len(before)))
    epochs = [[order.at(number)[1] for number in range(start, min(start + 50, 120))] for start in (0, 50, 100)]
    assert [len(set(epoch)) for epoch in epochs] == [50, 50, 20]
    assert await heir.admit("g0", 5, 0) == []


async def test_a_window_that_is_taken_away_leaves_no_gap(ledger, terms, replica):
    await ledger.open_run(terms(prompts=10, window=4, groups_per_step=50))
    await ledger.join(replica())
    await ledger.admit("g0", 2, 0, lengths=[(3, 99), (2, 50)])
    await ledger.open_run(terms(prompts=10, window=0, groups_per_step=50))
    assert [ticket.number for ticket in await ledger.admit("g0", 4, 0)] == [0, 1, 4, 5]


def test_a_length_is_a_byte():
    assert [length_code(tokens) for tokens in (0, 1, 100, 110, 2**31)] == [1, 9, 54, 55, 249]
    assert length_code(2**40) == 255
