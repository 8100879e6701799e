"""The ledger's state machine against a model in plain Python: random interleavings on a real server."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from slipstream.errors import FencedError, LedgerError, StalenessError
from slipstream.ledger.books import Snapshot
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Failure, Member, MemberExpired, RunTerms, Ticket

TTL, DEADLINE, ETA, BATCH, END, ATTEMPTS = 10, 25, 1, 2, 40, 3
CAP = (ETA + 1) * BATCH
OPEN = ("issued", "rolling", "scored", "buffered", "taken")
OWNERS = ("g0", "g1")
EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "30"))
SHRINK = "LEDGER_SHRINK" in os.environ  # a failing example is long without it, but found at once
_examples = itertools.count()


@dataclass
class Record:
    state: str = "issued"
    attempt: int = 0
    tries: int = 0
    owner: str = ""
    admitted: int = 0
    deadline: float = 0
    retry_at: float = 0
    stamps: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    reason: str = ""
    answers: dict[tuple[int, str, bool], Failure] = field(default_factory=dict)


class Model:
    """What the ledger should do, said as plainly as possible."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.version = self.step = self.durable = self.attempt_base = 0
        self.records: list[Record] = []
        self.members: dict[str, float] = {}
        self.granted: dict[str, list[int]] = {}

    def reissue(self, record: Record, reason: str, wait: float = 0, blamed: bool = True) -> None:
        if blamed and record.tries + 1 >= ATTEMPTS:
            record.state, record.reason, record.owner = "failed", reason, ""
            return
        record.state, record.owner, record.stamps = "issued", "", (0, 0, 0)
        record.attempt, record.tries = record.attempt + 1, record.tries + blamed
        record.retry_at = self.now + wait

    def dismiss(self, owner: str, blamed: bool) -> None:
        for record in self.records:
            if record.owner == owner:
                self.reissue(record, "lease_lost", blamed=blamed)
        self.members.pop(owner, None)
        self.granted.pop(owner, None)

    def expire(self) -> None:
        for owner in [owner for owner, end in self.members.items() if end <= self.now]:
            self.dismiss(owner, True)
        for record in self.records:
            if record.state in ("rolling", "scored") and record.deadline <= self.now:
                self.reissue(record, "deadline")

    def held(self, number: int, attempt: int) -> Record:
        if number >= len(self.records):
            raise LedgerError
        record = self.records[number]
        if record.attempt != attempt or (record.state == "trained" and record.step <= self.durable):
            raise FencedError
        return record

    def admit(self, owner: str, count: int, served: int, lost: bool) -> list[Ticket]:
        self.expire()
        if owner not in self.members:
            raise MemberExpired
        given = []
        if lost:
            given = [n for n in self.granted.get(owner, []) if self.records[n].state == "rolling"]
            given = [n for n in given if self.records[n].owner == owner]
        if self.version - ETA <= served <= self.version:
            waiting = [n for n, r in enumerate(self.records) if r.state == "issued" and r.retry_at <= self.now]
            waiting.sort(key=lambda n: (self.records[n].retry_at, str(n)))
            started = waiting[: max(0, count - len(given))]
            occupied = sum(record.state in OPEN for record in self.records)
            room = min(count - len(given) - len(started), CAP - occupied, END - len(self.records))
            for _ in range(room):
                started.append(len(self.records))
                self.records.append(Record(attempt=self.attempt_base))
            for number in started:
                record = self.records[number]
                record.state, record.owner, record.admitted = "rolling", owner, served
                record.deadline = self.now + DEADLINE
            given += started
        self.granted[owner] = given
        return [
            Ticket(n, self.records[n].attempt, self.records[n].admitted, self.records[n].deadline)
            for n in given
        ]

    def scored(self, number: int, attempt: int, tokens: int) -> None:
        record = self.held(number, attempt)
        if record.state == "rolling":
            record.state, record.stamps = "scored", (0, 0, tokens)
            record.deadline = self.now + DEADLINE
        elif record.state in ("issued", "dropped", "failed"):
            raise FencedError

    def buffered(self, number: int, attempt: int, stamps: tuple[int, int, int]) -> None:
        record = self.held(number, attempt)
        if record.state in ("buffered", "taken", "trained"):
            if record.stamps != stamps:
                raise LedgerError
        elif record.state not in ("rolling", "scored"):
            raise FencedError
        elif stamps[1] > self.version:
            raise StalenessError
        else:
            record.state, record.stamps, record.owner = "buffered", stamps, ""

    def fail(self, number: int, attempt: int, reason: str, retry: bool) -> Failure:
        asked = (attempt, reason, retry)
        if number < len(self.records):
            record = self.records[number]
            folded = record.state == "trained" and record.step <= self.durable
            if not folded and asked in record.answers:
                return record.answers[asked]
        record = self.held(number, attempt)
        if record.state not in ("rolling", "scored", "buffered"):
            raise FencedError
        wait = 2.0**record.tries
        if retry:
            self.reissue(record, reason, wait)
        else:
            record.state, record.reason, record.owner = "failed", reason, ""
        at = record.retry_at if record.state == "issued" else 0
        record.answers = {asked: Failure(record.state, record.attempt, at)}  # type: ignore[arg-type]
        return record.answers[asked]

    def drop(self, number: int, attempt: int, reason: str) -> None:
        record = self.held(number, attempt)
        if record.state == "dropped" and record.reason == reason:
            return
        if record.state not in ("rolling", "scored", "buffered"):
            raise FencedError
        record.state, record.reason, record.owner = "dropped", reason, ""

    def take(self, tickets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.expire()
        for number, attempt in tickets:
            if number < len(self.records):
                record = self.records[number]
                if record.attempt == attempt and record.state == "buffered":
                    record.state, record.step = "taken", self.step + 1
        known = [(n, a) for n, a in tickets if n < len(self.records)]
        return [(n, a) for n, a in known if self.records[n].attempt == a and self.records[n].state == "taken"]

    def back(self, after: int) -> None:
        for record in self.records:
            if record.step > after:
                record.state, record.step = "buffered", 0

    def commit(self, version: int) -> None:
        if version not in (self.version, self.version + 1):
            raise LedgerError
        taken = [record for record in self.records if record.state == "taken"]
        if not taken:
            raise LedgerError
        for record in taken:
            record.state = "trained"
        self.step, self.version = self.step + 1, version

    def restore(self) -> None:
        self.attempt_base = max(self.attempt_base + 1, int(self.now))
        self.members, self.granted = {}, {}
        for record in self.records:
            if record.state in ("issued", "rolling", "scored"):
                record.state, record.owner, record.stamps = "issued", "", (0, 0, 0)
                record.attempt, record.retry_at = self.attempt_base, self.now
            if record.state == "taken":
                record.state, record.step = "buffered", 0


def outcome(call: Callable[[], Any]) -> Any:
    """The call's value, or the type of the refusal."""
    try:
        return call()
    except (LedgerError, StalenessError) as error:
        return type(error)


owners = st.sampled_from(OWNERS)
numbers = st.integers(0, END)
picks = st.integers(0, 99)  # hypothesis prefers small values and first choices, so the usual comes first
lags = st.sampled_from([0, 0, 0, 0, 1])
stamped = st.sampled_from([0, 0, 0, 0, -1, -1, -2, 1])


class Machine(RuleBasedStateMachine):
    """Runs every call on the ledger and on the model, and compares answers and books."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.lost: dict[str, bool] = {}
        self.again: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.answer: Any = None
        self.learners = 0
        self.ledger = self.open()
        for owner in OWNERS:
            self.join(owner)

    def open(self, snapshot: bytes | None = None) -> Ledger:
        run = f"model-{os.getpid()}-{next(_examples)}"
        terms = RunTerms(
            run_id="r",
            dataset_fingerprint="d",
            prompts=7,
            seed=0,
            max_staleness=ETA,
            groups_per_step=BATCH,
            max_attempts=ATTEMPTS,
            end_ticket=END,
            ticket_deadline_s=DEADLINE,
        )

        async def opening() -> Ledger:
            ledger = await Ledger.connect(self.url, run, now=lambda: self.model.now)
            if snapshot is not None:
                await ledger.restore(snapshot)
            await ledger.open_run(terms)
            await ledger.claim_learner("L0")
            return ledger

        return self.runner.run(opening())

    def teardown(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()

    def both(self, real: Callable[[], Coroutine[Any, Any, Any]], model: Callable[[], Any]) -> Any:
        """Do it in both worlds; a call that succeeded may be repeated later."""
        expected = outcome(model)
        got = outcome(lambda: self.runner.run(real()))
        assert got == expected
        self.again, self.answer = (None, None) if isinstance(got, type) else (real, got)
        return got

    def choose(self, pick: int, *likely: str) -> int:
        """Mostly a ticket in a likely state, else any number, also one that was never issued."""
        self.keep_busy("g0")
        numbers = [n for n, record in enumerate(self.model.records) if record.state in likely]
        return numbers[pick % len(numbers)] if numbers and pick % 7 != 6 else pick % (END + 1)

    @property
    def learner(self) -> str:
        return f"L{self.learners}"

    def keep_busy(self, owner: str) -> None:
        """Most calls are only interesting while tickets are in flight."""
        if not any(record.owner == owner for record in self.model.records):
            self.join(owner)
            self.admit(owner, BATCH, 0, False)

    def attempt_of(self, number: int, lag: int) -> int:
        known = number < len(self.model.records)
        return self.model.records[number].attempt - lag if known else self.model.attempt_base

    @rule(owner=owners)
    def join(self, owner: str) -> None:
        def model() -> None:
            self.model.expire()
            self.model.members[owner] = self.model.now + TTL

        member = Member(id=owner, role="rollout", incarnation="a", ttl_s=TTL)
        self.both(lambda: self.ledger.join(member), model)

    @rule(owner=owners)
    def heartbeat(self, owner: str) -> None:
        def model() -> None:
            self.model.expire()
            if owner not in self.model.members:
                raise MemberExpired
            self.model.members[owner] = self.model.now + TTL

        self.both(lambda: self.ledger.heartbeat(owner), model)

    @rule(owner=owners)
    def leave(self, owner: str) -> None:
        self.keep_busy(owner)
        self.both(lambda: self.ledger.leave(owner), lambda: self.model.dismiss(owner, False))
        self.lost.pop(owner, None)

    @rule(
        owner=owners,
        count=st.integers(1, 3),
        behind=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
        reply_lost=st.booleans(),
    )
    def admit(self, owner: str, count: int, behind: int, reply_lost: bool) -> None:
        if owner not in self.model.members and count < 3:
            self.join(owner)
        served, lost = self.model.version - behind, self.lost.get(owner, False)
        seen = self.ledger._grants.get(owner, 0)
        given = self.both(
            lambda: self.ledger.admit(owner, count, served),
            lambda: self.model.admit(owner, count, served, lost),
        )
        self.again = None
        if isinstance(given, type):
            return
        self.lost[owner] = bool(given) and reply_lost
        if self.lost[owner]:
            self.ledger._grants[owner] = seen

    @rule(pick=picks, lag=lags, tokens=st.integers(0, 9))
    def scored(self, pick: int, lag: int, tokens: int) -> None:
        number = self.choose(pick, "rolling")
        attempt = self.attempt_of(number, lag)
        self.both(
            lambda: self.ledger.scored(number, attempt, tokens),
            lambda: self.model.scored(number, attempt, tokens),
        )

    @rule(pick=picks, lag=lags, tokens=st.integers(0, 9), newest=stamped, span=st.integers(0, 2))
    def buffered(self, pick: int, lag: int, tokens: int, newest: int, span: int) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt = self.attempt_of(number, lag)
        newest = max(0, self.model.version + newest)
        self.store(number, attempt, (max(0, newest - span), newest, tokens))

    def store(self, number: int, attempt: int, stamps: tuple[int, int, int]) -> None:
        self.both(
            lambda: self.ledger.buffered(number, attempt, "b", *stamps, True),
            lambda: self.model.buffered(number, attempt, stamps),
        )

    @rule(
        pick=picks,
        lag=lags,
        reason=st.sampled_from(["engine", "reward"]),
        retry=st.sampled_from([True, True, False]),
    )
    def fail(self, pick: int, lag: int, reason: str, retry: bool) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt = self.attempt_of(number, lag)
        self.both(
            lambda: self.ledger.fail(number, attempt, reason, retry),
            lambda: self.model.fail(number, attempt, reason, retry),
        )

    @rule(pick=picks, lag=lags, reason=st.sampled_from(["age", "no_signal"]))
    def drop(self, pick: int, lag: int, reason: str) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt = self.attempt_of(number, lag)
        self.both(
            lambda: self.ledger.drop(number, attempt, reason),
            lambda: self.model.drop(number, attempt, reason),
        )

    @rule(chosen=st.lists(numbers, max_size=4, unique=True), lag=lags)
    def take(self, chosen: list[int], lag: int) -> None:
        tickets = [(number, self.attempt_of(number, lag)) for number in chosen]
        step = self.model.step + 1

        async def real() -> list[tuple[int, int]]:
            taken = await self.ledger.take(step, tickets, self.learner)
            assert len(taken.tickets) + len(taken.refused) == len(tickets)
            return taken.tickets

        self.both(real, lambda: self.model.take(tickets))

    @rule()
    def store_all(self) -> None:
        """Moves the run on, so that many steps are reached."""
        for number, record in enumerate(self.model.records):
            if record.state in ("rolling", "scored"):
                self.store(number, record.attempt, (0, self.model.version, 5))

    @rule(owner=owners)
    def whole_step(self, owner: str) -> None:
        """What a run does all day; without it few examples would reach a second step."""
        self.join(owner)
        self.admit(owner, BATCH, 0, False)
        self.store_all()
        self.take_what_is_stored()
        self.commit(1)

    @rule()
    def take_what_is_stored(self) -> None:
        self.take([n for n, record in enumerate(self.model.records) if record.state == "buffered"][:BATCH], 0)

    @rule()
    def untake(self) -> None:
        step = self.model.step
        self.both(lambda: self.ledger.untake(step + 1, self.learner), lambda: self.model.back(step))

    @rule(ahead=st.sampled_from([0, 1, 1, 1, 2]))
    def commit(self, ahead: int) -> None:
        step, version = self.model.step + 1, self.model.version + ahead

        async def real() -> None:
            await self.ledger.commit(step, version, self.learner)

        self.both(real, lambda: self.model.commit(version))

    @rule(behind=st.integers(0, 2))
    def durable(self, behind: int) -> None:
        step = max(0, self.model.step - behind)

        def model() -> None:
            self.model.durable = max(self.model.durable, step)

        self.both(lambda: self.ledger.durable(step, self.learner), model)

    @rule(behind=st.integers(0, 2))
    def rollback(self, behind: int) -> None:
        step, version = max(0, self.model.step - behind), max(0, self.model.version - behind)
        self.learners += 1
        self.runner.run(self.ledger.claim_learner(f"L{self.learners}"))

        def model() -> None:
            if step < self.model.durable:
                raise LedgerError
            self.model.back(step)
            self.model.step = step

        async def real() -> None:
            await self.ledger.rollback(step, version, self.learner)

        self.both(real, model)

    @rule(seconds=st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0, 9.0, 11.0, 26.0]))
    def time_passes(self, seconds: float) -> None:
        self.keep_busy("g1")
        self.model.now += seconds
        self.again = None

    @rule()
    def expire(self) -> None:
        self.both(lambda: self.ledger.expire(), self.model.expire)

    @rule()
    def repeat(self) -> None:
        """The last call once more, as after a lost connection."""
        if self.again is not None:
            assert self.runner.run(self.again()) == self.answer

    @rule()
    def restore_elsewhere(self) -> None:
        """The server is lost; the run goes on from a snapshot on an empty one."""
        self.keep_busy("g1")
        snapshot = self.runner.run(self.ledger.snapshot())
        self.runner.run(self.ledger.close())
        self.ledger = self.open(snapshot)
        self.learners = 0
        self.model.restore()
        self.lost = {}
        self.again = None

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        audit = self.runner.run(self.ledger.audit())
        assert audit.problems == []
        book = msgspec.msgpack.decode(self.runner.run(self.ledger.snapshot()), type=Snapshot)
        assert (int(book.run["version"]), int(book.run["step"])) == (self.model.version, self.model.step)
        assert int(book.run["next"]) == len(self.model.records)
        found = {int(record["number"]): record for record in book.records}
        for number, record in enumerate(self.model.records):
            if record.state == "trained" and record.step <= self.model.durable:
                assert number not in found
            else:
                row = found.pop(number)
                names = ("state", "attempt", "tries", "owner", "tokens", "reason", "step")
                shown = replace(record), record.stamps[2]
                expected = [getattr(shown[0], name) if name != "tokens" else shown[1] for name in names]
                assert [row[name] for name in names] == [str(value) for value in expected]
        assert not found


@pytest.mark.timeout(600)
def test_every_interleaving_agrees_with_the_model(server):
    """Cases 66, 84, 97, 101, so far as they concern the ledger: any order of calls, repeats and losses."""
    machine = type("Bound", (Machine,), {"url": server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
