"""Ledger and shard are compared both ways, and what stays apart is repaired with a line within a minute."""

from __future__ import annotations

import asyncio
import logging

import pytest

from slipstream.buffer.comparison import LOOK_SECONDS, LOOKS, Comparison


@pytest.fixture
def bench(make_offers, make_intake, ledger, store, metrics):
    """A comparison of shard 0 of as many as asked for, with its offers and its intake."""

    def make(shards=1):
        offers = make_offers()
        intake = make_intake(offers)
        comparison = Comparison(ledger, store, intake, offers, shards, metrics)
        comparison.offers, comparison.intake = offers, intake
        return comparison

    return make


async def looks(comparison, count):
    for _ in range(count):
        await comparison.look()


def book(ledger, *tickets, state="buffered", shard="0", attempt=0):
    ledger.fly(*tickets, attempt=attempt)
    for ticket in tickets:
        ledger.states_of[ticket] = state
        if state == "buffered":
            ledger.shards[ticket] = shard


def test_every_repair_comes_before_the_learner_has_waited_a_minute():
    assert max(LOOKS.values()) * LOOK_SECONDS < 60


async def test_a_group_that_is_said_to_be_stored_and_is_nowhere_is_rolled_out_anew(
    bench, ledger, metrics, caplog
):
    comparison = bench()
    book(ledger, 1, 2)
    with caplog.at_level(logging.WARNING, "slipstream"):
        await looks(comparison, 1)
        assert ledger.states_of == {1: "buffered", 2: "buffered"}  # a moment is not enough
        await looks(comparison, 1)
    assert ledger.states_of == {1: "issued", 2: "issued"}
    assert (
        "2 groups (tickets 1, 2) are booked as stored here and nowhere to be found: rolled out anew"
        in caplog.text
    )
    assert (metrics.lost._value.get(), metrics.repaired.labels("absent")._value.get()) == (2, 2)


async def test_a_stored_group_that_nobody_offers_is_offered_again(bench, ledger, store, make_group, caplog):
    """It would have waited for the learner's last deadline."""
    comparison = bench()
    book(ledger, 1)
    store.put([make_group(1)])
    await looks(comparison, 1)
    assert not comparison.offers.offers(1)
    with caplog.at_level(logging.WARNING, "slipstream"):
        await looks(comparison, 1)
    assert comparison.offers.offers(1)
    assert "nobody offered them to the learner" in caplog.text


async def test_a_group_on_the_disk_that_was_never_booked_is_booked_and_offered(
    bench, ledger, store, make_group
):
    """Its sender and the one before that are gone."""
    comparison = bench()
    ledger.fly(1)
    store.put([make_group(1)])
    await looks(comparison, 2)
    assert ledger.states_of == {1: "buffered"}
    assert comparison.offers.offers(1)
    assert ledger.owners == ["rollout-0"]


async def test_a_scored_group_that_came_to_no_buffer_is_rolled_out_anew(bench, ledger, caplog):
    comparison = bench(shards=2)
    ledger.fly(2, 3)  # the other shard answers for 3
    await looks(comparison, LOOKS["mislaid"] - 1)
    assert ledger.states_of == {2: "scored", 3: "scored"}
    with caplog.at_level(logging.WARNING, "slipstream"):
        await looks(comparison, 1)
    assert ledger.states_of == {2: "issued", 3: "scored"}
    assert "1 groups (tickets 2) are scored, and in no buffer after some time" in caplog.text


async def test_a_group_that_is_in_hand_is_let_be(bench, ledger, make_group):
    """The disk may be slow."""
    comparison = bench()
    ledger.fly(1)
    storing = asyncio.create_task(comparison.intake.store(make_group(1)[1]))  # nothing is written, nobody works
    await asyncio.sleep(0.01)
    await looks(comparison, 9)
    assert ledger.states_of == {1: "scored"}
    storing.cancel()
    await asyncio.gather(storing, return_exceptions=True)
    await looks(comparison, LOOKS["mislaid"])
    assert ledger.states_of == {1: "issued"}


async def test_rows_that_the_ledger_has_done_with_are_deleted(bench, ledger, store, make_group):
    comparison = bench()
    book(ledger, 1, attempt=3)
    ledger.states_of[2] = "dropped"
    book(ledger, 4, state="taken")
    book(ledger, 5, state="rolling")
    store.put([make_group(1, attempt=3), make_group(2), make_group(3), make_group(4), make_group(5)])
    await looks(comparison, 2)
    assert sorted(row.ticket for row in store.rows) == [1, 4, 5]


async def test_what_agrees_and_what_is_apart_for_a_moment_is_let_be(bench, ledger, store, make_group, metrics):
    comparison = bench()
    book(ledger, 1)
    book(ledger, 2, shard="1")
    store.put([make_group(1)])
    comparison.offers.shelve(1)
    for _ in range(4):
        await looks(comparison, 1)
        comparison.offers._free.clear()
        await looks(comparison, 1)
        comparison.offers.shelve(1)
    await looks(comparison, 1)
    assert ledger.states_of == {1: "buffered", 2: "buffered"}
    assert all(metrics.repaired.labels(kind)._value.get() == 0 for kind in LOOKS)
