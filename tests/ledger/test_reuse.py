"""Groups that are trained on in several steps, groups that a buffer lost, and bounds on what is stored."""

from __future__ import annotations

import random

import pytest

from slipstream.errors import FencedError, StalenessError
from slipstream.ledger.records import RunTerms
from slipstream.staleness import admission_cap


@pytest.fixture
async def open_run(ledger, terms, replica):
    async def make(**changes):
        await ledger.open_run(terms(**changes))
        await ledger.claim_learner("L1")
        await ledger.join(replica())
        return ledger

    return make


async def store(ledger, count=8, size=100, version=0):
    tickets = await ledger.admit("g0", count, version)
    for each in tickets:
        await ledger.buffered(each.number, each.attempt, "g0", "0", 0, 0, 10, True, size)
    return [(each.number, each.attempt) for each in tickets]


async def train(ledger, step, tickets):
    await ledger.take(step, tickets, "L1")
    await ledger.commit(step, step, "L1", tickets)


async def state_of(ledger, number):
    return (await ledger.states([number])).get(number)


async def test_a_group_is_trained_once_its_last_use_is_made(open_run):
    ledger = await open_run(reuse=2)
    tickets = await store(ledger, 4)
    await train(ledger, 1, tickets)
    assert await state_of(ledger, 0) == "buffered"
    await train(ledger, 2, tickets)
    assert await state_of(ledger, 0) == "trained"
    counts = await ledger.counts()
    assert (counts.groups["trained"], counts.uses) == (4, 8)
    assert (await ledger.audit()).problems == []


async def test_a_rollback_takes_back_the_uses_of_the_lost_steps_and_no_others(open_run):
    """Promise 2 with reuse: one use for each durable step, whatever is lost in between."""
    ledger = await open_run(reuse=2)
    tickets = await store(ledger, 4)
    await train(ledger, 1, tickets)
    await ledger.durable(1, "L1")
    await train(ledger, 2, tickets)
    await ledger.claim_learner("L2")
    await ledger.rollback(1, 1, "L2")
    await ledger.advance_version(3, "L2")
    assert (await ledger.counts()).uses == 4
    await ledger.take(2, tickets, "L2")
    await ledger.commit(2, 4, "L2", tickets)
    assert await state_of(ledger, 0) == "trained"
    assert (await ledger.counts()).uses == 8
    await ledger.durable(2, "L2")
    assert await state_of(ledger, 0) is None  # folded
    audit = await ledger.audit()
    assert (audit.problems, audit.counts.uses) == ([], 8)


async def test_a_checkpoint_between_two_uses_folds_nothing_that_is_still_needed(open_run):
    ledger = await open_run(reuse=3)
    tickets = await store(ledger, 2)
    for step in (1, 2, 3):
        await train(ledger, step, tickets)
        if step < 3:
            await ledger.durable(step, "L1")
            assert await state_of(ledger, 0) == "buffered"
    assert await ledger.taken(3) == [0, 1]
    await ledger.durable(2, "L1")
    assert await state_of(ledger, 0) == "trained"  # its last use is in step 3, which is not durable yet


async def test_untaking_a_second_use_keeps_the_first(open_run):
    ledger = await open_run(reuse=2)
    tickets = await store(ledger, 2)
    await train(ledger, 1, tickets)
    await ledger.take(2, tickets, "L1")
    await ledger.untake(2, "L1")
    assert (await ledger.counts()).uses == 2
    await train(ledger, 2, tickets)
    assert await state_of(ledger, 0) == "trained"


async def test_uses_survive_a_lost_ledger(open_run, connect, terms):
    ledger = await open_run(reuse=2)
    tickets = await store(ledger, 2)
    await train(ledger, 1, tickets)
    again = await connect("-2")
    await again.restore(await ledger.snapshot())
    await again.open_run(terms(reuse=2))
    await again.claim_learner("L1")
    await train(again, 2, tickets)
    counts = (await again.audit()).counts
    assert (counts.groups["trained"], counts.uses) == (2, 4)
    assert (await again.audit()).problems == []


@pytest.mark.parametrize("seed", range(3))
async def test_random_histories_with_reuse_stay_in_balance(open_run, seed):
    """Takes, commits, restarts, checkpoints, losses and drops in any order: the book agrees with its records."""
    dice = random.Random(seed)
    ledger = await open_run(reuse=3, groups_per_step=2, max_staleness=5)
    learner, made, step, version, durable, line = "L1", 0, 0, 0, 0, {0: 0}
    for _ in range(60):
        await store(ledger, 2, size=dice.randrange(1, 50), version=version)
        free = [(number, attempt) for number, attempt, _ in await ledger.stored()]
        act = dice.choice(["train", "train", "train", "durable", "restart", "lose", "drop"])
        if act == "train" and free:
            batch = dice.sample(free, min(2, len(free)))
            await ledger.take(step + 1, batch, learner)
            if dice.random() < 0.8:
                await ledger.commit(step + 1, version + 1, learner, batch)
                step, version = step + 1, version + 1
                line[step] = version
            else:
                await ledger.untake(step + 1, learner)
        elif act == "durable":
            await ledger.durable(step, learner)
            durable = step
        elif act == "restart":
            made += 1
            learner = f"N{made}"
            await ledger.claim_learner(learner)
            if (await ledger.rollback(durable, line[durable], learner)).version > line[durable]:
                await ledger.advance_version(version + 1, learner)
                version += 1
            step, line[durable] = durable, version
        elif act == "lose" and free:
            await ledger.give_back("0", dice.sample(free, 1))
        elif act == "drop" and free:
            await ledger.drop(*dice.choice(free), "stale")
        assert (await ledger.audit()).problems == []
    counts = await ledger.counts()
    assert counts.uses <= 3 * counts.issued
    assert counts.conservation().holds


async def test_a_lost_group_is_rolled_out_anew_without_blame(open_run):
    ledger = await open_run(max_attempts=1)
    (first, second, *_) = await store(ledger, 4)
    assert await ledger.give_back("0", [first, second]) == [0, 1]
    assert await ledger.give_back("0", [first, second]) == []  # repeated
    again = await ledger.admit("g0", 2, 0)
    assert [(each.number, each.attempt) for each in again] == [(0, 1), (1, 1)]
    with pytest.raises(FencedError):
        await ledger.buffered(0, 0, "g0", "0", 0, 0, 10, True, 100)  # the shard's late word
    counts = await ledger.counts()
    assert (counts.lost, counts.dropped, counts.failed) == (2, {}, {})
    assert (await ledger.audit()).problems == []


async def test_what_is_taken_or_lies_elsewhere_is_not_given_back(open_run):
    ledger = await open_run()
    tickets = await store(ledger, 4)
    await ledger.take(1, tickets[:2], "L1")
    assert [number for number, _, _ in await ledger.stored()] == [2, 3]
    assert await ledger.give_back("0", tickets[:2]) == []
    assert await ledger.give_back("1", tickets[2:]) == []


async def test_stored_bytes_bound_what_is_admitted(open_run):
    """Back-pressure by tickets: nothing is dropped, and the batch of a step may always be open."""
    ledger = await open_run(max_bytes=1000)
    assert len(await ledger.admit("g0", 8, 0)) == 4  # of an unknown size: one batch
    for number in range(4):
        await ledger.buffered(number, 0, "g0", "0", 0, 0, 10, True, 200)
    assert (await ledger.counts()).bytes == 800
    assert len(await ledger.admit("g0", 8, 0)) == 1  # 800 + 200
    await ledger.take(1, [(n, 0) for n in range(4)], "L1")
    await ledger.commit(1, 1, "L1")
    assert (await ledger.counts()).bytes == 0
    assert len(await ledger.admit("g0", 8, 1)) == 4  # 5 · 200 are on their way


async def test_groups_larger_than_the_bound_go_on_batch_by_batch(open_run):
    ledger = await open_run(max_bytes=100)
    tickets = await store(ledger, 8, size=90)
    assert len(tickets) == 4
    assert await store(ledger, 8) == []
    await train(ledger, 1, tickets)
    assert len(await store(ledger, 8, version=1)) == 4


async def test_a_bound_on_groups_is_the_cap(open_run):
    ledger = await open_run(max_groups=5)
    assert len(await ledger.admit("g0", 8, 0)) == 5


@pytest.mark.parametrize(
    ("eta", "groups", "reuse", "cap"), [(4, 8, 1, 40), (4, 8, 2, 20), (2, 1, 2, 1), (4, 8, 5, 8), (0, 8, 1, 8)]
)
def test_groups_that_are_reused_are_fewer(eta, groups, reuse, cap):
    """So that under `fifo` the last use of a group, cap · reuse uses after its admission, is within the bound."""
    assert admission_cap(eta, groups, reuse=reuse) == cap
    assert -(-cap * reuse // groups) - 1 <= eta
    assert (
        RunTerms(
            run_id="r",
            dataset_fingerprint="d",
            prompts=1,
            seed=0,
            max_staleness=eta,
            groups_per_step=groups,
            reuse=reuse,
        ).cap
        == cap
    )


async def test_several_groups_are_booked_in_one_call_each_with_its_own_answer(open_run):
    ledger = await open_run()
    await ledger.admit("g0", 4, 0)
    good, fenced, future = (
        (0, 0, "g0", "0", 0, 0, 10, True, 7),
        (1, 9, "g0", "0", 0, 0, 10, True, 7),
        (2, 0, "g0", "0", 0, 5, 1, True, 7),
    )
    answers = await ledger.buffered_all([good, fenced, future, (3, 0, "g0", "0", 0, 0, 10, False, 7)])
    assert [type(each) for each in answers] == [type(None), FencedError, StalenessError, type(None)]
    assert [number for number, _, _ in await ledger.stored()] == [0, 3]
    again = await ledger.buffered_all([good, (0, 0, "g0", "0", 0, 0, 11, True, 7)])
    assert again[0] is None
    assert isinstance(again[1], FencedError)  # a final word: the sender need not offer it again
    assert (await ledger.audit()).problems == []
