"""Nobody claims what is another's: only the member that rolls a ticket says what becomes of it."""

from __future__ import annotations

import logging

import pytest

from slipstream.errors import FencedError, LedgerError
from slipstream.ledger.records import Member


@pytest.fixture
async def rolling(ledger, terms, replica):
    """Ticket 0 is rolled by g0; g1 and r0 have joined as well."""
    await ledger.open_run(terms())
    for name in ("g0", "g1"):
        await ledger.join(replica(name))
    await ledger.admit("g0", 1, 0)
    return ledger


@pytest.mark.parametrize("foreign", ["g1", "r0", "", "nobody"])
async def test_a_group_of_another_than_the_owner_is_fenced_at_every_transition(rolling, foreign):
    told = f"ticket 0 attempt 0 is of g0, not of {foreign or 'nobody'}"
    for call in (
        lambda: rolling.scored(0, 0, foreign, 10, {"timeout": 2}),
        lambda: rolling.buffered(0, 0, foreign, "0", 0, 0, 10, True),
        lambda: rolling.fail(0, 0, foreign, "engine", retry=True),
        lambda: rolling.hand_over(0, 0, foreign, 5, b"x", limit=100),
    ):
        with pytest.raises(FencedError, match=told):
            await call()
    if foreign:
        with pytest.raises(FencedError, match=told):
            await rolling.drop(0, 0, "unscored", 10, owner=foreign)
    assert await rolling.states([0]) == {0: "rolling"}
    assert (await rolling.counts()).unscored == {}
    await rolling.scored(0, 0, "g0", 10)  # the true group goes its way
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    assert (await rolling.audit()).problems == []


async def test_a_stored_group_stays_its_owners(rolling):
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    with pytest.raises(FencedError, match="is of g0, not of g1"):
        await rolling.buffered(0, 0, "g1", "0", 0, 0, 10, True)
    with pytest.raises(FencedError, match="is of g0, not of g1"):
        await rolling.scored(0, 0, "g1", 10)


async def test_a_stored_group_cannot_be_given_up_by_its_owner(rolling):
    """Its reply got lost, or somebody told it a lie: the group is there and is trained."""
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    with pytest.raises(FencedError, match="is buffered"):
        await rolling.fail(0, 0, "g0", "refused", retry=True)
    assert await rolling.states([0]) == {0: "buffered"}


async def test_a_second_scoring_of_a_stored_group_is_answered_as_stored(rolling):
    """A judge may say something else the second time; the sender must not offer it for ever."""
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, False)
    with pytest.raises(FencedError, match="other contents"):
        await rolling.buffered(0, 0, "g0", "0", 0, 0, 11, True)


async def test_scoring_says_whether_it_was_news(rolling):
    assert await rolling.scored(0, 0, "g0", 10)
    assert not await rolling.scored(0, 0, "g0", 10)


async def test_an_evaluation_item_is_reported_by_who_claimed_it(ledger, replica):
    for name in ("g0", "g1"):
        await ledger.join(replica(name))
    await ledger.open_eval("e1", 2, 0, 100)
    await ledger.claim_eval("g0", 1, 0)
    for item, claimant in ((0, "g0"), (1, "nobody")):
        with pytest.raises(
            FencedError, match=f"item {item} of evaluation e1 is claimed by {claimant}, not by g1"
        ):
            await ledger.report_eval("e1", item, "g1", 0, b"mine")
    assert (await ledger.eval_status("e1")).done == 0
    assert await ledger.report_eval("e1", 0, "g0", 0, b"true")
    assert await ledger.eval_results("e1") == {0: b"true"}


async def test_one_member_holds_a_buffer_shard_at_a_time(ledger, clock):
    def buffer(name: str, incarnation: str = "a", shard: str = "0") -> Member:
        return Member(id=name, role="buffer", incarnation=incarnation, shard=shard, ttl_s=10)

    await ledger.join(buffer("store"))
    with pytest.raises(LedgerError, match="store holds buffer shard 0"):
        await ledger.join(buffer("impostor"))
    await ledger.join(buffer("impostor", shard=""))
    assert {each.id: each.shard for each in await ledger.members("buffer")} == {"store": "0", "impostor": ""}
    await ledger.join(buffer("store", "b"))  # a new process of the same name takes over at once
    clock.advance(11)
    await ledger.join(buffer("heir"))  # the lease is over
    await ledger.leave("heir")
    await ledger.join(buffer("store", "c"))
    assert [each.shard for each in await ledger.members("buffer")] == ["0"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics_port", "abc"),
        ("detail", "{no JSON"),
        ("detail", "[1]"),
        ("pid", "-"),
        ("endpoint", b"\xff\xfe"),
    ],
)
async def test_a_member_that_announces_nonsense_is_left_out_with_one_line(
    ledger, replica, caplog, field, value
):
    await ledger.join(replica("g0"))
    await ledger.join(replica("bad"))
    await ledger._book._client.hset(f"{ledger._book._prefix}m:bad", field, value)
    with caplog.at_level(logging.WARNING, "slipstream"):
        for _ in range(3):
            assert [each.id for each in await ledger.members()] == ["g0"]
    assert caplog.text.count("member b'bad' announces nonsense and is left out") == 1


async def test_what_was_scored_and_is_nowhere_is_rolled_out_anew_and_nobody_is_to_blame(rolling):
    await rolling.scored(0, 0, "g0", 10)
    assert _facts(await rolling.standing()) == [(0, 0, "", "scored")]
    assert await rolling.mislaid([(0, 1), (9, 0)]) == []
    assert await rolling.mislaid([(0, 0)]) == [0]
    assert await rolling.mislaid([(0, 0)]) == []
    with pytest.raises(FencedError, match="attempt 1, not 0"):
        await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    (again,) = await rolling.admit("g1", 1, 0)
    assert (again.number, again.attempt) == (0, 1)
    assert (await rolling.counts()).lost == 0
    assert (await rolling.audit()).problems == []


async def test_a_group_that_was_stored_meanwhile_is_not_mislaid(rolling):
    await rolling.buffered(0, 0, "g0", "0", 0, 0, 10, True)
    assert await rolling.mislaid([(0, 0)]) == []
    assert await rolling.attempts([0, 7]) == {0: 0}
    assert _facts(await rolling.standing()) == [(0, 0, "0", "buffered")]


def _facts(standing):
    return [(each.number, each.attempt, each.shard, each.state) for each in standing]
