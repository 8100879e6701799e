"""Which member a connection is: its own word, compared with the ledger's list."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slipstream.errors import LedgerError
from slipstream.lifecycle.directory import AGAIN_SECONDS, FRESH_SECONDS, Directory
from slipstream.transport.base import REFUSED, RETRY
from slipstream.transport.origin import Origin


class FakeLedger:
    def __init__(self) -> None:
        self.listed = [("g0", "a", "rollout"), ("r0", "b", "reward")]
        self.reads, self.away = 0, False

    async def members(self):
        self.reads += 1
        await asyncio.sleep(0)
        if self.away:
            raise LedgerError("the ledger did not answer")
        return [SimpleNamespace(id=name, incarnation=life, role=role) for name, life, role in self.listed]


@pytest.fixture
def bench():
    ledger, now = FakeLedger(), [0.0]
    return SimpleNamespace(ledger=ledger, now=now, directory=Directory(ledger, lambda: now[0]))


G0 = Origin("g0", "a")


async def test_a_live_member_of_the_role_is_let_in_and_the_ledger_is_not_asked_each_time(bench):
    found = await asyncio.gather(*(bench.directory.refusal(G0, "rollout") for _ in range(20)))
    assert found == [None] * 20
    assert bench.ledger.reads == 1


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (Origin("r0", "b"), REFUSED),  # of another role
        (Origin("g0", "b"), RETRY),  # another process's name
        (Origin("g7", "a"), RETRY),
        (Origin(), RETRY),
    ],
)
async def test_whoever_is_no_live_member_of_the_role_is_not(bench, origin, status):
    reply = await bench.directory.refusal(origin, "rollout")
    assert reply is not None
    assert reply.status == status


async def test_one_that_joins_is_known_in_a_moment_and_one_that_leaves_after_a_while(bench):
    late = Origin("g1", "c")
    assert await bench.directory.refusal(late, "rollout") is not None
    bench.ledger.listed = [("g1", "c", "rollout")]
    bench.now[0] += 1.1 * AGAIN_SECONDS
    assert await bench.directory.refusal(late, "rollout") is None
    bench.ledger.listed = []
    bench.now[0] += FRESH_SECONDS
    assert await bench.directory.refusal(late, "rollout") is not None


async def test_strangers_do_not_have_the_ledger_asked_all_the_time(bench):
    for _ in range(50):
        await bench.directory.refusal(Origin("x", "y"), "rollout")
    assert bench.ledger.reads == 1


async def test_a_ledger_that_is_away_makes_senders_come_again(bench):
    bench.ledger.away = True
    reply = await bench.directory.refusal(G0, "rollout")
    assert reply is not None
    assert reply.status == RETRY
