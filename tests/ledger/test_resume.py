"""The same run or none: resume, an empty ledger, snapshots, and memory over ten million tickets."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest
import redis

from slipstream.errors import LedgerError, UserError
from slipstream.ledger.books import SNAPSHOT_SCHEMA, Snapshot
from slipstream.ledger.records import LedgerLost, MemberExpired


async def test_resume_with_another_dataset_is_refused(ledger, terms):
    """Case 85, so far as it concerns the ledger."""
    await ledger.open_run(terms())
    with pytest.raises(UserError) as refusal:
        await ledger.open_run(terms(dataset_fingerprint="other", prompts=30))
    assert "the rows of data are other ones here than in the ledger" in str(refusal.value)
    assert "the number of prompts of data is 100 in the ledger and 30 here" in str(refusal.value)
    with pytest.raises(UserError, match="seed is 0"):
        await ledger.open_run(terms(seed=1))


async def test_what_a_resume_may_change_is_recorded(ledger, terms):
    opened = await ledger.open_run(terms())
    assert opened.terms == terms()
    assert opened.changed == []
    assert await ledger.open_run(terms()) == opened
    state = await ledger.open_run(terms(max_staleness=3, end_ticket=40, oversampling=1.5))
    assert state.terms == terms(max_staleness=3, end_ticket=40, oversampling=1.5)
    assert "max_staleness: 1 to 3 at step 0" in state.changed
    assert await ledger.state() == state


@pytest.mark.parametrize(
    ("name", "value"), [("max_staleness", -1), ("groups_per_step", 0), ("oversampling", 0.5)]
)
def test_terms_that_cannot_work_are_refused(terms, name, value):
    with pytest.raises(UserError, match=f"{name} is {value}"):
        terms(**{name: value})


async def test_an_empty_ledger_is_never_version_zero_of_a_run_that_went_on(ledger, terms):
    """Case 101."""
    with pytest.raises(LedgerLost, match="empty but the run was at version 7"):
        await ledger.open_run(terms(), expect_version=7)
    await ledger.open_run(terms())
    with pytest.raises(LedgerLost, match="older than version 7"):
        await ledger.open_run(terms(), expect_version=7)


@pytest.fixture
async def midway(ledger, terms, replica):
    """A run with tickets in every state: 0-1 durable, 2 trained, 3 taken, 4-5 stored, 6 failed, 7 dropped,
    8 rolling, 9 waiting for another attempt."""
    await ledger.open_run(terms(max_staleness=3))
    await ledger.claim_learner("L1")
    await ledger.join(replica())
    await ledger.admit("g0", 10, 0)
    for number in range(6):
        await ledger.buffered(number, 0, "g0", "b0", 0, 0, 10, True)
    await ledger.take(1, [(0, 0), (1, 0)], "L1")
    await ledger.commit(1, 1, "L1")
    await ledger.durable(1, "L1")
    await ledger.take(2, [(2, 0)], "L1")
    await ledger.commit(2, 2, "L1")
    await ledger.take(3, [(3, 0)], "L1")
    await ledger.fail(6, 0, "g0", "engine_error", retry=False)
    await ledger.drop(7, 0, "no_signal", tokens=4)
    await ledger.fail(9, 0, "g0", "engine_error", retry=True)
    return ledger


async def test_a_snapshot_restores_the_run_on_an_empty_server(midway, connect, terms, replica, clock):
    """Cases 84 and 101: nothing is lost and nothing is trained twice."""
    snapshot = await midway.snapshot()
    heir = await connect("-heir")
    state = await heir.restore(snapshot)
    assert (state.version, state.step, state.durable_step, state.next) == (2, 2, 1, 10)
    assert await heir.restore(snapshot) == state
    await heir.open_run(terms(max_staleness=3), expect_version=2)
    counts = await heir.counts()
    assert {name: size for name, size in counts.groups.items() if size} == {
        "issued": 2,
        "buffered": 3,
        "trained": 3,
        "dropped": 1,
        "failed": 1,
    }
    assert (counts.dropped, counts.failed) == ({"no_signal": 1}, {"engine_error": 1})
    assert counts.conservation().holds
    assert (await heir.audit()).problems == []
    assert await heir.taken(3) == []
    book = msgspec.msgpack.decode(await heir.snapshot(), type=Snapshot)
    assert {record["number"]: record["step"] for record in book.records if record["state"] == "buffered"} == {
        "3": "0",
        "4": "0",
        "5": "0",
    }
    await heir.claim_learner("L2")
    await heir.join(replica("g9"))
    again = await heir.admit("g9", 3, 2)
    assert [ticket.number for ticket in again] == [8, 9, 10]
    assert all(ticket.attempt > 1 for ticket in again)
    taken = await heir.take(3, [(number, 0) for number in range(6)], "L2")
    assert taken.tickets == [(3, 0), (4, 0), (5, 0)]


async def test_a_ledger_as_new_as_the_snapshot_is_not_overwritten(midway):
    snapshot = await midway.snapshot()
    with pytest.raises(LedgerError, match="the ledger is at version 2, the snapshot at 2"):
        await midway.restore(snapshot)


async def test_an_older_ledger_is_replaced_whole(midway, connect, terms, replica):
    heir = await connect("-older")
    await heir.open_run(terms())
    await heir.join(replica())
    await heir.admit("g0", 8, 0)
    await heir.restore(await midway.snapshot())
    assert (await heir.audit()).problems == []
    assert (await heir.state()).next == 10


async def test_another_snapshot_schema_is_refused(midway):
    snapshot = msgspec.msgpack.decode(await midway.snapshot(), type=Snapshot)
    for schema in (SNAPSHOT_SCHEMA - 1, SNAPSHOT_SCHEMA + 1):
        other = msgspec.structs.replace(snapshot, schema=schema)
        with pytest.raises(msgspec.ValidationError, match=f"schema {schema}, this process reads 2"):
            await midway.restore(msgspec.msgpack.encode(other))


async def test_a_ledger_whose_tickets_were_issued_out_of_turn_is_refused(midway, server, terms):
    """A release before could do so: `next` alone would then say that a ticket was issued which never was."""
    with redis.Redis.from_url(server.url) as client:
        client.sadd(midway._book._prefix + "ahead", 12)
    with pytest.raises(UserError, match="out of turn"):
        await midway.open_run(terms())


async def test_the_audit_finds_a_book_that_was_tampered_with(midway, server):
    assert (await midway.audit()).holds
    prefix = midway._book._prefix
    with redis.Redis.from_url(server.url) as client:
        client.hset(prefix + "t:4", "state", "trained")
        problems = (await midway.audit()).problems
        assert "groups:buffered: counter 2, records 1" in problems
        assert "groups:trained: counter 3, records 4" in problems
        client.hset(prefix + "t:4", "state", "buffered")
        client.zrem(prefix + "flight", 8)
        assert (await midway.audit()).problems == ["flight index: 0 tickets, records 1"]
        client.zadd(prefix + "flight", {8: 0})
        client.delete(prefix + "t:4")
        client.zrem(prefix + "records", 4)
        assert any("not conserved" in problem for problem in (await midway.audit()).problems)


async def test_the_equation_is_printed_with_its_reasons(midway):
    equation = await midway.conservation()
    assert equation.holds
    assert equation.line == (
        "issued 10 (64 tokens) = in flight 2 (0 tokens) + scored 0 (0 tokens) + buffered 3 (30 tokens)"
        " + trained 3 (30 tokens) + dropped 1 (4 tokens) [no_signal 1] + failed 1 (0 tokens) [engine_error 1]"
    )


async def test_ten_million_scattered_tickets_fit_in_64_mb(make_server, terms, replica):
    """Outcomes drawn at random, so that no ranges form: the worst case for a book of what is done."""
    from slipstream.ledger.client import Ledger

    tickets = 10_000_000
    outcome = np.random.default_rng(0).choice(3, size=tickets, p=[0.8, 0.15, 0.05])
    labels = ["trained", "dropped:no_signal", "failed:lease_lost"]
    bitmaps = [np.packbits(outcome == place).tobytes() for place in range(3)]
    folded = {f"groups:{label}": str(int((outcome == place).sum())) for place, label in enumerate(labels)}
    server = make_server()
    async with (
        await Ledger.connect(server.url, "big") as ledger,
        await Ledger.connect(server.url, "seed") as seed,
    ):
        await seed.open_run(terms())
        begun = msgspec.msgpack.decode(await seed.snapshot(), type=Snapshot)
        run = begun.run | {"next": str(tickets), "version": "1000", "step": "1000", "durable_step": "1000"}
        packed = {label: zlib.compress(bits, 1) for label, bits in zip(labels, bitmaps, strict=True)}
        book = msgspec.structs.replace(begun, run=run, folded=folded, bitmaps=packed)
        with redis.Redis.from_url(server.url) as client:
            before = client.info("memory")["used_memory"]
            await ledger.restore(msgspec.msgpack.encode(book))
            assert client.info("memory")["used_memory"] - before < 64 << 20
        await ledger.open_run(terms(), expect_version=1000)
        await ledger.claim_learner("L")
        await ledger.join(replica())
        (ticket,) = await ledger.admit("g0", 1, 1000)
        assert ticket.number == tickets
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", 1000, 1000, 1, True)
        await ledger.take(1001, [(ticket.number, ticket.attempt)], "L")
        await ledger.commit(1001, 1001, "L")
        await ledger.durable(1001, "L")
        assert (await ledger.audit()).problems == []
        assert (await ledger.counts()).groups["trained"] == int((outcome == 0).sum()) + 1


async def test_a_run_that_goes_on_under_another_release_dismisses_the_members_of_the_former(
    ledger, terms, replica
):
    await ledger.open_run(terms(release="1+a"))
    await ledger.claim_learner("L")
    await ledger.join(replica())
    (ticket,) = await ledger.admit("g0", 1, 0)
    await ledger.open_run(terms(release="1+a"))
    await ledger.heartbeat("g0")
    state = await ledger.open_run(terms(release="2+b"))
    assert state.terms.release == "2+b"
    assert state.changed == ["release: 1+a to 2+b at step 0"]
    assert await ledger.members() == []
    with pytest.raises(MemberExpired):
        await ledger.heartbeat("g0")
    assert (await ledger.states([ticket.number])) == {ticket.number: "issued"}
