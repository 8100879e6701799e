from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slipstream.errors import FencedError, SlipstreamError, TransportTimeout
from slipstream.ledger.records import EvalClaim, LedgerFull, MemberExpired, Ticket
from slipstream.lifecycle.life import Life
from slipstream.rollout import service as service_module
from slipstream.rollout.roller import Unfinished
from slipstream.rollout.service import Rollout
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.transport.base import OK, REFUSED, Reply


class Prompts(list):
    """Prompts by their place, in an order of each epoch's own."""

    shuffled = True


class FakeLedger:
    """Grants what a test put there; ends the life a few turns after nothing is left."""

    def __init__(self, life: Life) -> None:
        self.idle_turns = 8
        self.life = life
        self.grants: list = []
        self.claims: list[EvalClaim] = []
        self.failed: list[tuple] = []
        self.handed: list[tuple] = []
        self.replicas: list = []
        self.named: list[bool] = []
        self.fenced = False
        self.asked: list[tuple[int, int]] = []

    async def hand_over(self, ticket, attempt, owner, tokens, partial, limit, to):
        assert owner == "rollout-0"
        self.handed.append((ticket, attempt, tokens, partial))
        if self.fenced:
            raise FencedError("taken over")
        return len(partial) <= limit

    async def members(self, role):
        return self.replicas

    async def states(self, tickets):
        return dict.fromkeys(tickets, "buffered")

    async def admit(self, owner, count, version, named):
        self.named.append(named)
        self.asked.append((count, version))
        await asyncio.sleep(0)
        if not self.grants:
            self.idle_turns -= 1
            if not self.idle_turns:
                self.life.closing()
            return []
        grant = self.grants.pop(0)
        if isinstance(grant, Exception):
            raise grant
        return grant

    async def claim_eval(self, owner, count, version):
        return self.claims.pop(0) if self.claims else None

    async def fail(self, ticket, attempt, owner, reason, retry, detail):
        assert owner == "rollout-0"
        self.failed.append((ticket, attempt, reason, detail))
        if self.fenced:
            raise FencedError("taken over")


class FakeRoller:
    """Ends every order as told; one without an end hangs until it is interrupted, or cancelled if it is deaf."""

    def __init__(self) -> None:
        self.orders, self.cancelled = [], []
        self.ends: dict[int, Reply | Exception] = {}
        self.deaf = False
        self.begun = asyncio.Event()
        self.free_slots = 8
        self.rows = 0
        self.sampling: list = []
        self.moved: list[tuple] = []
        self.engaged: set[str] = set()
        self.interrupted = asyncio.Event()
        self.left: list[str] = []

    async def drain(self, seconds):
        self.left.append("drain")
        self.interrupted.set()

    async def interrupt(self, order, to):
        self.moved.append((order, to))

    def give_up(self):
        self.left.append("give up")

    def engage(self, order):
        self.engaged.add(order.id)

    def release(self, order):
        self.engaged.discard(order.id)

    async def roll(self, order):
        self.orders.append(order)
        self.begun.set()
        end = self.ends.get(order.header.ticket)
        if end is None:
            try:
                await (asyncio.Event() if self.deaf else self.interrupted).wait()
                raise Unfinished(3, b"three tokens")
            except asyncio.CancelledError:
                self.cancelled.append(order.header.ticket)
                raise
        if isinstance(end, Exception):
            raise end
        return end


class FakeSite:
    def __init__(self) -> None:
        self.given_back = 0

    async def join(self, served, lost, note):
        self.served, self.lost, self.note = served, lost, note

    async def give_back(self):
        self.given_back += 1
        self.lost()


class FakeFollower:
    swap_seconds = 0.0

    def __init__(self) -> None:
        self.swaps = 0
        self.anew, self.swapped, self.verdict = 0, None, True
        self.swapping: asyncio.Event | None = None

    def note(self):
        return {}

    async def swap_if_newer(self):
        self.swaps += 1
        if self.swapping is not None:
            await self.swapping.wait()
        swapped, self.swapped = self.swapped, None
        return swapped

    async def trusted(self):
        return self.verdict

    async def serve_anew(self):
        self.anew += 1


@pytest.fixture
async def bench(config, make_engine, prompt, monkeypatch):
    for name in ("_GOODBYE_SECONDS", "_HAND_OVER_SECONDS"):
        monkeypatch.setattr(service_module, name, 0.05)
    monkeypatch.setattr(service_module, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "_LONGEST_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.0)
    life = Life()
    parts = SimpleNamespace(
        config=config,
        name="rollout-0",
        site=FakeSite(),
        ledger=FakeLedger(life),
        engine=make_engine(),
        follower=FakeFollower(),
        roller=FakeRoller(),
        prompts=Prompts([prompt]),
        evaluations={"holdout": [prompt, prompt]},
        metrics=RolloutMetrics(),
    )
    return SimpleNamespace(parts=parts, life=life, rollout=Rollout(parts, life))


def ticket(number: int, deadline: float = 60.0, attempt: int = 0) -> Ticket:
    return Ticket(number, attempt, 0, deadline)


def ends(bench) -> dict[str, float]:
    samples = next(iter(bench.parts.metrics.groups.collect())).samples
    return {sample.labels["end"]: sample.value for sample in samples if sample.name.endswith("_total")}


async def test_an_idle_replica_sleeps_until_there_is_news(bench, monkeypatch):
    for name in ("_IDLE_SECONDS", "_LONGEST_IDLE_SECONDS"):
        monkeypatch.setattr(service_module, name, 3600.0)
    bench.parts.ledger.idle_turns = 3
    running = asyncio.create_task(bench.rollout.run())
    for turns in (1, 2, 3):
        async with asyncio.timeout(30):
            while len(bench.parts.ledger.asked) < turns:  # noqa: ASYNC110  (no event announces a call)
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(bench.parts.ledger.asked) == turns
        bench.parts.follower.on_news()
    await running


async def test_prompts_are_drawn_beside_the_event_loop(bench):
    """A stream may have to read a good way for one, and the heartbeat and all that is sampled must go on."""
    drawn_in = []

    class Stream(Prompts):
        def __getitem__(self, index):
            drawn_in.append(threading.current_thread())
            return super().__getitem__(index)

    bench.parts.prompts = Stream(list(bench.parts.prompts))
    bench.rollout = Rollout(bench.parts, bench.life)
    bench.parts.roller.ends = {5: Reply(OK), 6: Reply(OK)}
    bench.parts.ledger.grants = [[ticket(5), ticket(6)]]
    await bench.rollout.run()
    assert len(drawn_in) == 2
    assert threading.main_thread() not in drawn_in
    assert ends(bench)["stored"] == 2


@pytest.mark.parametrize("stop", [False, True])
async def test_tickets_that_are_lost_while_their_prompts_are_read_are_not_started(bench, stop):
    """Others have them already, or get them when this replica leaves."""

    class Slow(Prompts):
        def __getitem__(self, index):
            bench.life.closing() if stop else bench.rollout._lose_all()
            return super().__getitem__(index)

    bench.parts.prompts = Slow(list(bench.parts.prompts))
    bench.parts.ledger.grants = [[ticket(5), ticket(6)]]
    await bench.rollout.run()
    assert bench.parts.roller.orders == []
    assert bench.parts.ledger.failed == bench.parts.ledger.handed == []


async def test_a_stop_does_not_wait_for_a_prompt_that_is_read(bench):
    """The seconds that a stop leaves are for handing over what is in flight."""
    read, reading = threading.Event(), threading.Event()

    class Stuck(Prompts):
        def __getitem__(self, index):
            reading.set()
            read.wait(60)
            return super().__getitem__(index)

    bench.parts.prompts = Stuck(list(bench.parts.prompts))
    bench.parts.ledger.grants = [[ticket(5)]]
    running = asyncio.create_task(bench.rollout.run())
    try:
        await asyncio.to_thread(reading.wait, 30)
        bench.life.closing()
        await asyncio.wait_for(running, 30)
    finally:
        read.set()
    assert "give up" in bench.parts.roller.left
    assert bench.parts.roller.orders == bench.parts.ledger.failed == []


@pytest.mark.parametrize(("took", "seconds"), [(25.0, [15.0, 35.0]), (45.0, [0.001, 15.0])])
async def test_the_time_that_a_prompt_takes_to_read_is_the_tickets(bench, monkeypatch, took, seconds):
    clock = [0.0]

    class Slow(Prompts):
        def __getitem__(self, index):
            clock[0] += took / 2  # there are two
            return super().__getitem__(index)

    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    bench.parts.prompts = Slow(list(bench.parts.prompts))
    bench.parts.ledger.grants = [[ticket(5, deadline=130.0), ticket(6, deadline=150.0)]]
    bench.parts.roller.ends |= {5: Reply(OK), 6: Reply(OK)}
    await bench.life.run(bench.rollout.run())
    assert [order.deadline_seconds for order in bench.parts.roller.orders] == seconds


async def test_the_span_of_admission_leaves_the_reading_of_prompts_out(bench, monkeypatch):
    clock, spans = [0.0], []

    class Slow(Prompts):
        def __getitem__(self, index):
            clock[0] += 30.0
            return super().__getitem__(index)

    async def admit(*_, **__):
        clock[0] += 0.5
        return [ticket(5)]

    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(service_module.tracing, "admitted", lambda *span: spans.append(span[1:]))
    bench.parts.prompts, bench.parts.ledger.admit = Slow(list(bench.parts.prompts)), admit
    bench.parts.roller.ends[5] = Reply(OK)
    assert await bench.rollout._admit() == 1
    assert spans == [(5, 0, 0.5)]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Reply(REFUSED, "malformed: ticket 17"), "refused"),
        (TransportTimeout("nobody there"), "undelivered"),
        (TimeoutError("not sampled"), "deadline"),
        (SlipstreamError("no such token"), "engine"),
    ],
)
async def test_a_failed_group_goes_back_with_its_reason(bench, end, reason):
    """Case 79: the ledger counts it, backs off and bounds its attempts."""
    bench.parts.roller.ends[5] = end
    bench.parts.ledger.grants = [[ticket(5)]]
    await bench.life.run(bench.rollout.run())
    assert [failure[:3] for failure in bench.parts.ledger.failed] == [(5, 0, reason)]
    assert ends(bench) == {reason: 1.0}  # labels are a few words, never a message


async def test_a_stored_group_is_counted(bench):
    bench.parts.roller.ends[5] = Reply(OK)
    bench.parts.ledger.grants = [[ticket(5)]]
    await bench.life.run(bench.rollout.run())
    assert ends(bench) == {"stored": 1.0}
    assert bench.parts.ledger.failed == []


async def test_a_group_that_another_attempt_took_over_is_let_go(bench):
    bench.parts.roller.ends[5] = SlipstreamError("late")
    bench.parts.ledger.fenced = True
    bench.parts.ledger.grants = [[ticket(5)]]
    await bench.life.run(bench.rollout.run())
    assert ends(bench) == {"fenced": 1.0}


async def test_tickets_whose_lease_ran_out_are_aborted(bench):
    """They are being sampled by others, so going on with them is waste and would be refused."""
    bench.parts.roller.deaf = True
    bench.parts.ledger.grants = [[ticket(5), ticket(6)]]
    running = asyncio.create_task(bench.life.run(bench.rollout.run()))
    await bench.parts.roller.begun.wait()
    bench.parts.site.lost()
    await running
    assert sorted(bench.parts.roller.cancelled) == [5, 6]
    assert bench.parts.ledger.failed == []


async def test_what_is_in_flight_at_the_end_is_handed_over(bench):
    bench.parts.ledger.grants = [[ticket(5), ticket(6, attempt=2)]]
    await bench.life.run(bench.rollout.run())
    assert bench.parts.roller.left == ["drain", "give up"]
    assert bench.parts.ledger.handed == [(5, 0, 3, b"three tokens"), (6, 2, 3, b"three tokens")]
    assert ends(bench) == {"handed_over": 2.0}
    assert bench.parts.roller.cancelled == bench.parts.ledger.failed == []


@pytest.mark.parametrize(("changes", "end"), [({"handover_mb": 0}, "lost"), ({}, "fenced")])
async def test_a_hand_over_that_is_not_taken_is_counted(bench, changes, end):
    rollout = bench.parts.config.rollout.model_copy(update=changes)
    bench.parts.config = bench.parts.config.model_copy(update={"rollout": rollout})
    bench.parts.ledger.fenced = end == "fenced"
    bench.parts.ledger.grants = [[ticket(5)]]
    await bench.life.run(bench.rollout.run())
    assert ends(bench) == {end: 1.0}


async def test_evaluation_items_in_flight_at_the_end_go_back_as_they_are(bench):
    bench.parts.ledger.claims = [EvalClaim("0:holdout", 0, [0])]
    bench.parts.roller.deaf = True
    await bench.life.run(bench.rollout.run())
    assert bench.parts.roller.cancelled == [0]
    assert bench.parts.ledger.handed == []


async def test_a_partial_that_cannot_be_read_makes_the_group_begin_anew(bench):
    bench.parts.ledger.grants = [[Ticket(5, 1, 0, 60.0, b"no partial")]]
    await bench.life.run(bench.rollout.run())
    assert [failure[:3] for failure in bench.parts.ledger.failed] == [(5, 1, "partial")]
    assert bench.parts.roller.orders == []


async def test_what_does_not_let_go_is_given_back_without_blame(bench):
    bench.parts.ledger.grants = [[ticket(5)]]
    bench.parts.roller.deaf = True
    await bench.life.run(bench.rollout.run())
    assert bench.parts.roller.cancelled == [5]
    assert bench.parts.roller.engaged == set()
    assert bench.parts.ledger.failed == []


async def test_a_ticket_that_is_granted_again_has_the_time_that_is_left_of_it(bench, monkeypatch):
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    bench.parts.ledger.grants = [[ticket(5, deadline=130.0), ticket(6, deadline=150.0)]]
    bench.parts.roller.ends |= {5: Reply(OK), 6: Reply(OK)}
    await bench.life.run(bench.rollout.run())
    assert [order.deadline_seconds for order in bench.parts.roller.orders] == [40.0, 60.0]


@pytest.mark.parametrize("error", [MemberExpired("join again"), LedgerFull("maxmemory")])
async def test_admission_goes_on_after_a_pause_of_the_ledger(bench, error):
    """Case 100: a full server pauses producers."""
    bench.parts.ledger.grants = [error, [ticket(5)]]
    bench.parts.roller.ends[5] = Reply(OK)
    await bench.life.run(bench.rollout.run())
    assert ends(bench) == {"stored": 1.0}


async def test_only_whole_groups_are_admitted(bench):
    bench.parts.roller.rows = bench.parts.config.rollout.engine.max_sequences - 5
    await bench.life.run(bench.rollout.run())
    assert set(bench.parts.ledger.asked) == {(2, 0)}


async def test_nothing_is_admitted_before_the_first_weights(bench):
    bench.parts.engine.version = None
    running = asyncio.create_task(bench.life.run(bench.rollout.run()))
    while not bench.parts.follower.swaps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    bench.life.closing()
    await running
    assert bench.parts.ledger.asked == []


async def test_the_version_stays_while_evaluation_items_are_in_flight(bench):
    bench.parts.ledger.claims = [EvalClaim("0:holdout", 0, [0, 1])]
    await bench.life.run(bench.rollout.run())
    assert bench.parts.follower.swaps == 0
    assert [order.header.kind for order in bench.parts.roller.orders] == ["eval", "eval"]


async def test_an_evaluation_item_that_fails_is_tried_a_bounded_number_of_times(bench):
    bench.parts.ledger.claims = [EvalClaim("0:holdout", 0, [0])]
    bench.parts.roller.ends[0] = SlipstreamError("no")
    bench.parts.ledger.idle_turns = 50
    await bench.life.run(bench.rollout.run())
    assert len(bench.parts.roller.orders) == bench.parts.config.rollout.attempts
    assert bench.parts.follower.swaps > 0  # and the replica goes on


def with_lane(bench, *names):
    rollout = bench.parts.config.rollout.model_copy(update={"express": 1, "express_sequences": 3})
    bench.parts.config = bench.parts.config.model_copy(update={"rollout": rollout})
    fields = {"detail": {"load": 0}, "version": 0}
    bench.parts.ledger.replicas = [SimpleNamespace(id=name, **fields) for name in names]
    bench.parts.ledger.idle_turns = 50
    return Rollout(bench.parts, bench.life)


async def test_an_express_replica_takes_only_what_is_handed_to_it(bench):
    await bench.life.run(with_lane(bench, "a", "rollout-0").run())
    assert bench.parts.ledger.named[-1] is True
    assert bench.parts.ledger.asked[-1] == (3, 0)


async def test_stragglers_are_handed_to_the_express_replica(bench):
    def straggler(admitted):
        return SimpleNamespace(rows=2, header=SimpleNamespace(admitted_version=admitted))

    bench.parts.engine.version = 4
    orders = [straggler(4), straggler(2), straggler(3)]
    bench.parts.roller.sampling = list(orders)
    await bench.life.run(with_lane(bench, "rollout-0", "x").run())
    assert bench.parts.roller.moved == [(orders[1], "x")]
    assert bench.parts.ledger.named[-1] is False


@pytest.mark.parametrize(("verdict", "out"), [(True, 0), (False, 1)])
async def test_a_replica_that_differs_from_the_learner_gives_all_back_and_pulls_anew(bench, verdict, out):
    bench.parts.follower.swapped, bench.parts.follower.verdict = 1, verdict
    bench.parts.site.lost = lambda: None
    await bench.rollout._turn()
    await asyncio.sleep(0)  # the canary is heard beside everything else
    await bench.rollout._turn()
    assert (bench.parts.site.given_back, bench.parts.follower.anew) == (out, out)


async def test_an_engine_that_ended_ends_its_replica_with_the_cause_before_it_takes_work(bench):
    """It would fail whatever is admitted for it, ticket by ticket, until the next version comes."""
    bench.parts.engine.ended = SlipstreamError("engine: its thread died: MemoryError()")
    bench.parts.ledger.grants = [[ticket(5)]]
    with pytest.raises(SlipstreamError, match="its thread died: MemoryError"):
        await bench.life.run(bench.rollout.run())
    assert bench.parts.ledger.asked == bench.parts.ledger.failed == []


async def test_an_engine_that_loses_a_version_right_after_the_swap_is_no_fault_of_the_replica(bench):
    bench.parts.follower.swapped, bench.parts.engine.version = 3, None
    assert await bench.rollout._turn() == 0
    assert bench.parts.metrics.swaps._value.get() == 1
    assert bench.parts.ledger.asked == []


async def test_a_stop_does_not_wait_for_a_swap(bench):
    """An engine that is started anew over it takes minutes, and what is in flight has seconds to be handed over."""
    bench.parts.follower.swapping = asyncio.Event()
    running = asyncio.create_task(bench.life.run(bench.rollout.run()))
    while not bench.parts.follower.swaps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    bench.life.closing()
    await asyncio.wait_for(running, 30)
    assert "give up" in bench.parts.roller.left
