"""Calls that go together: one round trip for all that wait, and an answer for each."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.errors import FencedError, LedgerError
from slipstream.ledger.batching import MOST_AT_ONCE, CallBatch


class Far:
    """A server that answers when told; "bad" is refused."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = False

    async def send(self, groups) -> list[Exception | None]:
        self.batches.append([name for (name,) in groups])
        await self.answers.wait()
        if self.away:
            raise LedgerError("no answer")
        return [FencedError(name) if name == "bad" else None for (name,) in groups]


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_goes_together_and_each_gets_its_own_answer():
    far = Far()
    batch = CallBatch(far.send)
    far.answers.clear()
    first = [asyncio.create_task(batch.call(name)) for name in ("a", "bad")]
    await settled()
    rest = [asyncio.create_task(batch.call(name)) for name in ("b", "c", "bad")]
    await settled()
    assert far.batches == [["a", "bad"]]
    far.answers.set()
    outcomes = await asyncio.gather(*first, *rest, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), FencedError, type(None), type(None), FencedError]
    assert far.batches == [["a", "bad"], ["b", "c", "bad"]]


async def test_a_batch_is_bounded():
    far = Far()
    batch = CallBatch(far.send)
    await asyncio.gather(*(batch.call("x") for _ in range(2 * MOST_AT_ONCE + 1)))
    assert [len(names) for names in far.batches] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]


async def test_a_failure_reaches_all_that_were_sent_and_the_next_call_is_new():
    far = Far()
    batch = CallBatch(far.send)
    far.away = True
    outcomes = await asyncio.gather(*(batch.call("x") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [LedgerError] * 3
    far.away = False
    await batch.call("x")


@pytest.mark.parametrize("answers", [[None], [None] * 3])
async def test_a_wrong_count_of_answers_reaches_every_caller(answers):
    """And the next call is new."""

    async def send(groups):
        return answers if len(groups) == 2 else [None]

    batch = CallBatch(send)
    outcomes = await asyncio.gather(batch.call("a"), batch.call("b"), return_exceptions=True)
    assert [type(each) for each in outcomes] == [LedgerError] * 2
    await batch.call("c")


async def test_one_that_is_cancelled_leaves_the_others_alone():
    far = Far()
    batch = CallBatch(far.send)
    far.answers.clear()
    gone, stays = (asyncio.create_task(batch.call(name)) for name in "ab")
    await settled()
    gone.cancel()
    await settled()
    far.answers.set()
    await stays
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_closing_leaves_nobody_waiting():
    far = Far()
    batch = CallBatch(far.send)
    far.answers.clear()
    calls = [asyncio.create_task(batch.call("x"))]
    await settled()
    calls.append(asyncio.create_task(batch.call("y")))
    await settled()
    await batch.close()
    await asyncio.wait(calls, timeout=20)
    assert all(call.cancelled() for call in calls)


async def test_scored_tickets_go_to_the_server_together(ledger, terms, replica):
    """The real transition, each refused or booked by itself."""
    await ledger.open_run(terms())
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 8, 0)
    assert len(tickets) == 8
    held = [(each.number, each.attempt) for each in tickets]
    calls = [ledger.scored(number, attempt, "g0", 5) for number, attempt in held]
    outcomes = await asyncio.gather(*calls, ledger.scored(held[0][0], 99, "g0", 5), return_exceptions=True)
    assert outcomes[:-1] == [True] * len(held)
    assert isinstance(outcomes[-1], FencedError)
    counts = await ledger.counts()
    assert (counts.groups["scored"], counts.tokens["scored"]) == (len(held), 5 * len(held))
    assert (await ledger.audit()).holds
