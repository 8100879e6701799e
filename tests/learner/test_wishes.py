"""What a person asks of the learner is done once."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.learner import wishes as wishes_module
from slipstream.learner.wishes import Wishes
from slipstream.lifecycle.life import Life


class FakeLedger:
    def __init__(self, life: Life, *wishes: str) -> None:
        self._life, self._wishes, self.cleared = life, list(wishes), 0

    async def asked(self) -> str:
        if not self._wishes:
            self._life.closing()
            return ""
        return self._wishes.pop(0)

    async def fulfilled(self, what: str) -> None:
        assert what
        self.cleared += 1


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(wishes_module, "POLL_SECONDS", 0.0)


async def test_a_checkpoint_is_wanted_once():
    life = Life()
    ledger = FakeLedger(life, "", "checkpoint", "")
    wishes = Wishes(ledger)  # type: ignore[arg-type]
    await wishes.follow(life)
    assert wishes.take_checkpoint()
    assert not wishes.take_checkpoint()
    assert not wishes.drain
    assert ledger.cleared == 1


async def test_a_drain_ends_a_wait_that_nothing_else_would_end():
    life = Life()
    wishes = Wishes(FakeLedger(life, "drain"))  # type: ignore[arg-type]
    ended: list[bool] = []

    async def never() -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            ended.append(True)

    waiting = asyncio.create_task(wishes.unless_drained(never()))
    await wishes.follow(life)
    assert await waiting is None
    assert ended == [True]
    assert wishes.drain


async def test_without_a_drain_the_work_s_own_result_or_fault_comes_through():
    wishes = Wishes(FakeLedger(Life()))  # type: ignore[arg-type]

    async def work(fault: bool) -> int:
        if fault:
            raise ValueError("broken")
        return 7

    assert await wishes.unless_drained(work(False)) == 7
    with pytest.raises(ValueError, match="broken"):
        await wishes.unless_drained(work(True))
