from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import NoReturn

import pytest

from slipstream.errors import LedgerError
from slipstream.ledger.records import Member, MemberExpired, MemberInfo, RunNotOpen
from slipstream.lifecycle import site as site_module
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.site import Site, arrivals
from slipstream.telemetry.metrics import Metrics
from slipstream.transport.base import OK, Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.memory import Hub


class FakeLedger:
    def __init__(self) -> None:
        self.joined: list[Member] = []
        self.left: list[str] = []
        self.beats: list[int | None] = []
        self.beaten, self.joined_again = asyncio.Event(), asyncio.Event()
        self.errors: list[Exception] = []
        self.away = False

    async def state(self) -> NoReturn:
        raise RunNotOpen("nobody has opened it")

    async def join(self, member: Member) -> None:
        self.joined.append(member)
        if len(self.joined) > 1:
            self.joined_again.set()

    async def leave(self, member_id: str) -> None:
        if self.away:
            await asyncio.Event().wait()
        self.left.append(member_id)

    async def heartbeat(self, member_id: str, version: int | None = None, detail=None) -> None:
        self.beats.append(version)
        self.beaten.set()
        if self.errors:
            raise self.errors.pop()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(site_module, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(site_module, "LEAVE_SECONDS", 0.01)


def site_of(life: Life, stack: AsyncExitStack, ledger: FakeLedger) -> Site:
    site = Site(None, "rollout-0", "rollout", Metrics(), life, stack)  # type: ignore[arg-type]
    site.ledger = ledger  # type: ignore[assignment]
    return site


async def test_a_member_joins_tells_its_version_and_leaves():
    ledger, life = FakeLedger(), Life()

    async def service() -> None:
        async with AsyncExitStack() as stack:
            site = site_of(life, stack, ledger)
            await site.join(served=lambda: 7)
            await ledger.beaten.wait()

    await life.run(service())
    assert [member.id for member in ledger.joined] == ["rollout-0"]
    assert ledger.beats[0] == 7
    assert ledger.left == ["rollout-0"]


async def test_a_member_whose_lease_ran_out_loses_its_work_before_it_joins_again():
    ledger, life = FakeLedger(), Life()
    ledger.errors = [MemberExpired("gone")]
    lost: list[int] = []

    async def service() -> None:
        async with AsyncExitStack() as stack:
            await site_of(life, stack, ledger).join(lost=lambda: lost.append(len(ledger.joined)))
            await ledger.joined_again.wait()

    await life.run(service())
    assert lost == [1]


async def test_leaving_does_not_wait_for_a_ledger_that_is_away():
    ledger, life = FakeLedger(), Life()
    ledger.away = True

    async def service() -> None:
        async with AsyncExitStack() as stack:
            await site_of(life, stack, ledger).join()

    await life.run(service())
    assert ledger.left == []


async def test_a_ledger_that_refuses_the_heartbeat_ends_the_process():
    ledger, life = FakeLedger(), Life()
    ledger.errors = [LedgerError("replaced")]

    async def service() -> None:
        async with AsyncExitStack() as stack:
            await site_of(life, stack, ledger).join()
            await asyncio.Event().wait()

    with pytest.raises(LedgerError, match="replaced"):
        await life.run(service())


async def test_arrivals_end_with_the_stop_and_what_comes_later_stays_with_its_sender():
    hub, life = Hub(), Life()
    async with hub.make_receiver(ReceiverOptions()) as receiver, hub.make_sender(SenderOptions()) as sender:
        sender.set_peers({"r": Peer(receiver.endpoint)})
        first = asyncio.create_task(sender.deliver(Parcel("1", "x"), 5))
        seen = []
        async for delivery in arrivals(receiver, life):
            seen.append(delivery.parcel.id)
            await delivery.reply(Reply(OK))
            assert (await first).status == OK
            life.closing()
        assert seen == ["1"]


def test_members_are_known_by_their_fields():
    """The site's peers come from the ledger's members; a field that is renamed there must fail here."""
    assert {"id", "endpoint", "incarnation"} <= set(MemberInfo.__struct_fields__)


class _State:
    def __init__(self, status: str) -> None:
        self.status = status


class RunLedger(FakeLedger):
    """A ledger whose run is in each of these states in turn, the last one for good."""

    def __init__(self, *states: str) -> None:
        super().__init__()
        self.states = list(states)
        self.asked = 0

    async def state(self) -> _State:
        if not self.joined:
            raise RunNotOpen("nobody has opened it")
        self.asked += 1
        if len(self.states) > 1:
            return _State(self.states.pop(0))
        return _State(self.states[0])


@pytest.fixture
def paced(monkeypatch):
    """Beats that let others have their turn, where there is no end to them."""
    monkeypatch.setattr(site_module, "HEARTBEAT_SECONDS", 0.001)


async def lived(ledger: RunLedger, with_run: bool = True, seconds: float = 0.5) -> bool:
    """Whether the service ended by itself, in order, within the time."""
    ends: list[str] = []
    life = Life(on_end=lambda: ends.append("watched"), with_run=with_run)

    async def service() -> None:
        async with AsyncExitStack() as stack:
            await site_of(life, stack, ledger).join()
            life.drains()
            await life.wait_for_stop()
            ends.append("drained")

    try:
        await asyncio.wait_for(life.run(service()), seconds)
    except TimeoutError:
        return False
    assert ends == ["watched", "drained"]
    assert ledger.left == ["rollout-0"]
    return True


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("end", ["finished", "halted"])
async def test_a_process_that_nobody_watches_ends_with_its_run(end):
    assert await lived(RunLedger("running", "paused", end))


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("states", [("running",), ("running", "paused")])
async def test_a_run_that_goes_on_or_pauses_ends_no_process(states):
    assert not await lived(RunLedger(*states), seconds=0.1)


@pytest.mark.usefixtures("paced")
async def test_a_process_that_came_before_the_learner_waits_for_it_to_take_an_ended_run_up(monkeypatch):
    assert not await lived(RunLedger("finished"), seconds=0.1)
    assert await lived(RunLedger("finished", "finished", "running", "finished"))
    monkeypatch.setattr(site_module, "OPEN_SECONDS", 0.05)
    assert await lived(RunLedger("finished")), "nobody took it up"


@pytest.mark.usefixtures("paced")
async def test_a_process_that_somebody_watches_is_ended_by_them():
    ledger = RunLedger("running", "finished")
    assert not await lived(ledger, with_run=False, seconds=0.1)
    assert ledger.asked == 0
