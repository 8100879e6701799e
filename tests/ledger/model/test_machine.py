"""The ledger's state machine against a model in plain Python: random interleavings on a real server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Aside, Member, MemberExpired

END = 40  # as in the model
OWNERS = ("g0", "g1")
EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "15"))
SHRINK = "LEDGER_SHRINK" in os.environ  # a failing example is long without it, but found at once


owners = st.sampled_from(OWNERS)
numbers = st.integers(0, END)
picks = st.integers(0, 99)  # hypothesis prefers small values and first choices, so the usual comes first
foreigners = st.sampled_from([False, False, False, False, False, True])
lags = st.sampled_from([0, 0, 0, 0, 1])
stamped = st.sampled_from([0, 0, 0, 0, -1, -1, -2, 1])


class Machine(RuleBasedStateMachine):
    """Runs every call on the ledger and on the model, and compares answers and books."""

    twin_type: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.twin = type(self).twin_type()
        self.model = self.twin.model
        self.both, self.run, self.attempt_of = self.twin.both, self.twin.run, self.twin.attempt_of
        self.owner_of = self.twin.owner_of
        self.lost: dict[str, bool] = {}
        self.learners = 0
        for owner in OWNERS:
            self.join(owner)

    @property
    def ledger(self) -> Ledger:
        return self.twin.ledger

    def teardown(self) -> None:
        self.twin.close()

    @invariant()
    def books_agree(self) -> None:
        self.twin.check_books()

    def choose(self, pick: int, *likely: str) -> int:
        """Mostly a ticket in a likely state, else any number, also one that was never issued."""
        self.keep_busy("g0")
        numbers = [n for n, record in self.model.records.items() if record.state in likely]
        return numbers[pick % len(numbers)] if numbers and pick % 7 != 6 else pick % (END + 1)

    @property
    def learner(self) -> str:
        return f"L{self.learners}"

    def keep_busy(self, owner: str) -> None:
        """Most calls are only interesting while tickets are in flight."""
        if not any(
            record.owner == owner and record.state in ("rolling", "scored")
            for record in self.model.records.values()
        ):
            self.join(owner)
            self.admit(owner, self.model.BATCH, 0, False, False)

    @rule(owner=owners)
    def join(self, owner: str) -> None:
        def model() -> None:
            self.model.expire()
            self.model.members[owner] = self.model.now + self.model.TTL

        member = Member(id=owner, role="rollout", incarnation="a", ttl_s=self.model.TTL)
        self.both(lambda: self.ledger.join(member), model)

    @rule(owner=owners)
    def heartbeat(self, owner: str) -> None:
        def model() -> None:
            self.model.expire()
            if owner not in self.model.members:
                raise MemberExpired
            self.model.members[owner] = self.model.now + self.model.TTL

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
        named=st.sampled_from([False, False, False, True]),
    )
    def admit(
        self,
        owner: str,
        count: int,
        behind: int,
        reply_lost: bool,
        named: bool,
    ) -> None:
        if owner not in self.model.members and count < 3:
            self.join(owner)
        served, lost = self.model.version - behind, self.lost.get(owner, False)
        seen = self.ledger._grants.get(owner, 0)
        given = self.both(
            lambda: self.ledger.admit(owner, count, served, named=named),
            lambda: self.model.admit(owner, count, served, lost, named),
        )
        self.twin.again = None
        if isinstance(given, type):
            return
        self.lost[owner] = bool(given) and reply_lost
        if self.lost[owner]:
            self.ledger._grants[owner] = seen

    @rule(pick=picks, lag=lags, foreign=foreigners, tokens=st.integers(0, 9))
    def scored(self, pick: int, lag: int, foreign: bool, tokens: int) -> None:
        number = self.choose(pick, "rolling")
        attempt, owner = self.attempt_of(number, lag), self.owner_of(number, foreign)

        async def real() -> None:
            await self.ledger.scored(number, attempt, owner, tokens)

        self.both(real, lambda: self.model.scored(number, attempt, owner, tokens))

    @rule(
        pick=picks,
        lag=lags,
        foreign=foreigners,
        tokens=st.integers(0, 9),
        newest=stamped,
        span=st.integers(0, 2),
    )
    def buffered(self, pick: int, lag: int, foreign: bool, tokens: int, newest: int, span: int) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt, owner = self.attempt_of(number, lag), self.owner_of(number, foreign)
        newest = max(0, self.model.version + newest)
        self.store(number, attempt, owner, (max(0, newest - span), newest, tokens))

    def store(self, number: int, attempt: int, owner: str, stamps: tuple[int, int, int]) -> None:
        self.both(
            lambda: self.ledger.buffered(number, attempt, owner, "b", *stamps, True),
            lambda: self.model.buffered(number, attempt, owner, stamps),
        )

    @rule(
        pick=picks,
        lag=lags,
        foreign=foreigners,
        reason=st.sampled_from(["engine", "reward"]),
        retry=st.sampled_from([True, True, False]),
    )
    def fail(self, pick: int, lag: int, foreign: bool, reason: str, retry: bool) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt, owner = self.attempt_of(number, lag), self.owner_of(number, foreign)
        self.both(
            lambda: self.ledger.fail(number, attempt, owner, reason, retry),
            lambda: self.model.fail(number, attempt, owner, reason, retry),
        )

    @rule(
        pick=picks,
        lag=lags,
        foreign=foreigners,
        tokens=st.sampled_from([0, 3, 5, 9]),
        to=st.sampled_from(["", "", *OWNERS, "g9"]),
        blob=st.binary(min_size=1, max_size=8),
    )
    def hand_over(self, pick: int, lag: int, foreign: bool, tokens: int, to: str, blob: bytes) -> None:
        number = self.choose(pick, "rolling", "scored")
        attempt, owner = self.attempt_of(number, lag), self.owner_of(number, foreign)
        self.both(
            lambda: self.ledger.hand_over(number, attempt, owner, tokens, blob, self.model.LIMIT, to),
            lambda: self.model.hand_over(number, attempt, owner, tokens, to, blob),
        )

    @rule(pick=picks, lag=lags, scored=st.booleans())
    def mislaid(self, pick: int, lag: int, scored: bool) -> None:
        """A shard that compares itself with the book does not find the group."""
        number = self.choose(pick, "scored" if scored else "buffered")
        attempt = self.attempt_of(number, lag)

        async def real() -> list[int]:
            group = [(number, attempt)]
            return await (self.ledger.mislaid(group) if scored else self.ledger.give_back("b", group))

        self.both(real, lambda: self.model.mislaid(number, attempt, "scored" if scored else "buffered"))
        self.twin.again = None  # a repeated call finds nothing to give back

    @rule()
    def flying(self) -> None:
        again = self.twin.again, self.twin.answer
        self.both(lambda: self.ledger.flying(), self.model.flying)
        self.twin.again, self.twin.answer = again

    @rule(
        pick=picks,
        lag=lags,
        foreign=foreigners,
        by_run=st.booleans(),
        reason=st.sampled_from(["age", "no_signal"]),
    )
    def drop(self, pick: int, lag: int, foreign: bool, by_run: bool, reason: str) -> None:
        number = self.choose(pick, "rolling", "scored", "buffered")
        attempt, owner = self.attempt_of(number, lag), "" if by_run else self.owner_of(number, foreign)
        self.both(
            lambda: self.ledger.drop(number, attempt, reason, owner=owner),
            lambda: self.model.drop(number, attempt, owner, reason),
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
        for number, record in self.model.records.items():
            if record.state in ("rolling", "scored"):
                self.store(number, record.attempt, record.owner, (0, self.model.version, 5))

    @rule(owner=owners)
    def whole_step(self, owner: str) -> None:
        """What a run does all day; without it few examples would reach a second step."""
        self.join(owner)
        self.admit(owner, self.model.BATCH, 0, False, False)
        self.store_all()
        self.take_what_is_stored()
        self.commit(1)

    @rule()
    def take_what_is_stored(self) -> None:
        self.take(
            [n for n, record in self.model.records.items() if record.state == "buffered"][: self.model.BATCH],
            0,
        )

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

    @rule(size=st.integers(1, 2), without=st.integers(0, 2))
    def commit_named(self, size: int, without: int) -> None:
        """The learner names what it trained, and what of the batch had no part in it, whether the take arrived or
        not."""
        stored = [n for n, record in self.model.records.items() if record.state in ("taken", "buffered")]
        named, idle = stored[:size], stored[size : size + without]
        tickets = [(number, self.model.records[number].attempt) for number in named]
        dropped = [(number, self.model.records[number].attempt, "nonfinite") for number in idle]
        step, version = self.model.step + 1, self.model.version + 1

        async def real() -> None:
            await self.ledger.commit(step, version, self.learner, tickets, dropped)

        if named:
            self.both(real, lambda: self.model.commit(version, named, idle))

    @rule(number=numbers)
    def drop_by_hand(self, number: int) -> None:
        self.both(lambda: self.ledger.drop_by_hand(number), lambda: self.model.drop_by_hand(number))

    @rule(
        chosen=st.lists(numbers, max_size=3, unique=True),
        lag=lags,
        how=st.sampled_from(["", "again", "failed"]),
    )
    def set_aside(self, chosen: list[int], lag: int, how: str) -> None:
        fates = (how == "again", how == "failed")
        groups = [(number, self.attempt_of(number, lag), "stale", *fates) for number in chosen]
        step = self.model.step + 1
        self.both(
            lambda: self.ledger.set_aside(step, self.learner, [Aside(*group) for group in groups]),
            lambda: self.model.set_aside(groups),
        )

    @rule(behind=st.integers(0, 2))
    def durable(self, behind: int) -> None:
        step = max(0, self.model.step - behind)

        def model() -> None:
            self.model.durable = max(self.model.durable, step)

        self.both(lambda: self.ledger.durable(step, self.learner), model)

    @rule(behind=st.integers(0, 2))
    def rollback(self, behind: int) -> None:
        step = max(0, self.model.step - behind)
        version = self.model.line[step]
        self.learners += 1
        self.run(self.ledger.claim_learner(f"L{self.learners}"))

        async def real() -> None:
            state = await self.ledger.rollback(step, version, self.learner)
            if state.version > version:
                await self.ledger.advance_version(state.version + 1, self.learner)

        self.both(real, lambda: self.model.rollback(step))
        self.twin.again = None  # two calls, of which the second may not be made twice

    @rule(seconds=st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0, 9.0, 11.0, 26.0]))
    def time_passes(self, seconds: float) -> None:
        self.keep_busy("g1")
        self.model.now += seconds
        self.twin.again = None

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def the_clock_is_set_back(self, seconds: float) -> None:
        self.expire()  # what has happened was seen by then
        self.model.set_back += seconds
        self.expire()  # seconds that pass before the ledger is asked again cannot be told from the step back
        self.twin.again = None

    @rule()
    def expire(self) -> None:
        self.both(lambda: self.ledger.expire(), self.model.expire)

    @rule()
    def repeat(self) -> None:
        """The last call once more, as after a lost connection."""
        if self.twin.again is not None:
            assert self.run(self.twin.again()) == self.twin.answer

    @rule()
    def restore_elsewhere(self) -> None:
        """The server is lost; the run goes on from a snapshot on an empty one."""
        self.keep_busy("g1")
        self.twin.move()
        self.learners = 0
        self.model.restore()
        self.lost = {}
        self.twin.again = None


@pytest.mark.timeout(600)
def test_every_interleaving_agrees_with_the_model(twin_type):
    """Cases 66, 84, 97, 101, so far as they concern the ledger: any order of calls, repeats and losses."""
    machine = type("Bound", (Machine,), {"twin_type": staticmethod(twin_type)})
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
