"""What the network and the server may do to a call: restarts, freezes, cancelled calls, late deliveries."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from redis.exceptions import ConnectionError

from slipstream.errors import EXIT_OK, LedgerError
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import LedgerLost, MemberExpired, RunNotOpen
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.process import run_process


@pytest.mark.process
async def test_a_killed_server_with_its_data_goes_on(make_server, terms, replica):
    """Case 101, with persistence: calls wait and the run goes on where it was."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.join(replica())
        before = await ledger.admit("g0", 3, 0)
        server.kill()
        waiting = asyncio.create_task(ledger.admit("g0", 2, 0))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        after = await waiting
        assert [ticket.number for ticket in before + after] == [0, 1, 2, 3, 4]
        assert (await ledger.audit()).problems == []


@pytest.mark.process
async def test_a_server_that_stays_away_is_an_error_at_the_deadline(make_server, terms):
    """Case 101."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=1.5) as ledger:
        await ledger.open_run(terms())
        server.kill()
        with pytest.raises(LedgerError, match=r"did not answer state within 1\.5 s"):
            await ledger.state()


@pytest.mark.process
async def test_a_server_that_comes_back_empty_is_restored_from_the_checkpoint(make_server, terms, replica):
    """Case 101, without persistence: no call takes it for version 0."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.claim_learner("L1")
        await ledger.join(replica())
        await ledger.admit("g0", 3, 0)
        await ledger.advance_version(7, "L1")
        snapshot = await ledger.snapshot()
        server.kill()
        shutil.rmtree(Path(server.url.removeprefix("unix://")).parent / "appendonlydir")
        await asyncio.to_thread(server.start)
        for refused in (ledger.state(), ledger.admit("g0", 1, 7), ledger.commit(1, 8, "L1")):
            with pytest.raises(RunNotOpen):
                await refused
        with pytest.raises(MemberExpired):
            await ledger.heartbeat("g0")
        with pytest.raises(LedgerLost):
            await ledger.open_run(terms(), expect_version=7)
        await ledger.restore(snapshot)
        await ledger.open_run(terms(), expect_version=7)
        await ledger.join(replica())
        assert [ticket.number for ticket in await ledger.admit("g0", 4, 7)] == [0, 1, 2, 3]


async def test_cancelled_calls_lose_no_ticket(make_server, terms, replica):
    """Case 97: 300 calls, many cancelled at a random moment; every ticket arrives exactly once."""
    server = make_server()
    chance = random.Random(0)
    async with await Ledger.connect(server.url, "r", deadline=60) as ledger:
        await ledger.open_run(terms(groups_per_step=1000, prompts=1000))
        await ledger.join(msgspec.structs.replace(replica(), ttl_s=600.0))
        arrived, cancelled = [], 0
        for _ in range(300):
            call = asyncio.create_task(ledger.admit("g0", 1, 0))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            call.cancel()
            try:
                arrived += [ticket.number for ticket in await call]
            except asyncio.CancelledError:
                cancelled += 1
        arrived += [ticket.number for ticket in await ledger.admit("g0", 1, 0)]
        assert cancelled > 0
        assert sorted(arrived) == list(range((await ledger.state()).next))
        assert len(arrived) == len(set(arrived))


@pytest.mark.process
async def test_a_call_on_a_frozen_server_can_be_cancelled(make_server, terms):
    """Case 99: the cancellation is not swallowed while waiting for a reply."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=60) as ledger:
        await ledger.open_run(terms())
        server.process.send_signal(signal.SIGSTOP)
        try:
            call = asyncio.create_task(ledger.state())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not call.done()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(call, 50)
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert (await ledger.state()).version == 0


@pytest.mark.process
def test_a_stop_during_a_call_ends_the_process_every_time(make_server):
    """Case 99: twenty times, while a reply is awaited that does not come."""
    server = make_server()

    async def service(life: Life) -> None:
        async with await Ledger.connect(server.url, "r", deadline=600) as ledger:
            server.process.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await ledger.state()

    for _ in range(20):
        try:
            assert run_process(service, drain_seconds=600.0) == EXIT_OK
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.process
async def test_a_call_on_a_frozen_server_ends_at_its_deadline(make_server, terms):
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=1.5) as ledger:
        await ledger.open_run(terms())
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(LedgerError, match="did not answer"):
                await ledger.state()
        finally:
            server.process.send_signal(signal.SIGCONT)


async def test_a_repeated_send_after_a_lost_reply_is_one_transition(make_server, terms, replica, monkeypatch):
    """The server did it, the reply got lost, the client sends again."""
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.claim_learner("L")
        await ledger.join(replica())
        send, calls = ledger._book._send, Counter()

        async def lose_first_reply(command):
            reply = await send(command)
            calls[command[0]] += 1
            if calls[command[0]] == 1:
                raise ConnectionError("the reply got lost")
            return reply

        monkeypatch.setattr(ledger._book, "_send", lose_first_reply)
        tickets = await ledger.admit("g0", 3, 0)
        assert [ticket.number for ticket in tickets] == [0, 1, 2]
        await ledger.buffered(0, 0, "g0", "b0", 0, 0, 10, True)
        assert (await ledger.fail(1, 0, "g0", "engine_error", retry=True)).attempt == 1
        await ledger.drop(2, 0, "age", tokens=5)
        assert (await ledger.take(1, [(0, 0)], "L")).tickets == [(0, 0)]
        await ledger.commit(1, 1, "L")
        await ledger.durable(1, "L")
        counts = await ledger.counts()
        assert (counts.issued, counts.open, counts.groups["trained"]) == (3, 1, 1)
        assert set(calls.values()) == {2}
        assert (await ledger.audit()).problems == []


async def test_a_sending_that_arrives_late_changes_nothing(server, terms, replica, monkeypatch):
    """A frozen server or a healed partition delivers what the client has long given up and sent again."""
    async with await Ledger.connect(server.url, "late", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.claim_learner("L")
        await ledger.join(replica())
        send, held_back = ledger._book._send, []

        async def hold_back_first(command):
            if all(command[0] != former[0] for former in held_back):
                held_back.append(command)
                raise ConnectionError("the connection broke")
            return await send(command)

        async def deliver_late():
            for command in held_back:
                await send(command)
            del held_back[:]

        monkeypatch.setattr(ledger._book, "_send", hold_back_first)
        assert [ticket.number for ticket in await ledger.admit("g0", 2, 0)] == [0, 1]
        await deliver_late()
        assert [ticket.number for ticket in await ledger.admit("g0", 2, 0)] == [2, 3]
        await deliver_late()
        for number in range(4):
            await ledger.buffered(number, 0, "g0", "b0", 0, 0, 1, True)
        del held_back[:]
        await ledger.take(1, [(0, 0), (1, 0)], "L")
        await ledger.untake(1, "L")
        await deliver_late()
        await ledger.take(1, [(2, 0)], "L")
        del held_back[:]
        await ledger.untake(1, "L")
        await ledger.commit(1, 1, "L", [(2, 0)])
        assert await ledger.states([0, 1, 2, 3]) == {0: "buffered", 1: "buffered", 2: "trained", 3: "buffered"}
        assert (await ledger.audit()).problems == []


async def test_many_replicas_together_keep_the_cap(server, terms, replica):
    ledgers = [await Ledger.connect(server.url, "crowd", deadline=50) for _ in range(8)]
    await ledgers[0].open_run(terms(groups_per_step=16))
    for place, ledger in enumerate(ledgers):
        await ledger.join(replica(f"g{place}"))
    calls = [ledger.admit(f"g{place}", 3, 0) for place, ledger in enumerate(ledgers) for _ in range(3)]
    given = [ticket.number for tickets in await asyncio.gather(*calls) for ticket in tickets]
    assert sorted(given) == list(range(32))
    await asyncio.gather(*(ledger.close() for ledger in ledgers))
