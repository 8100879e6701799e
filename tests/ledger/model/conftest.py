"""The model that the ledger is compared with: what it should do, said as plainly as possible."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import pytest

from slipstream.errors import FencedError, LedgerError, StalenessError
from slipstream.ledger.books import Snapshot
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Failure, MemberExpired, RunTerms, Ticket
from slipstream.staleness import age

OPEN = ("issued", "rolling", "scored", "buffered", "taken")
FLIES = ("rolling", "scored")
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
    answers: dict[tuple[int, str, bool], Any] = field(default_factory=dict)
    partial: tuple[int, bytes] = (0, b"")
    to: str = ""


class Model:
    """A run with its members; every method raises what the ledger should refuse with.

    `wide`: over-sampled, and no group may pass the bound.
    """

    TTL: ClassVar = 10
    DEADLINE: ClassVar = 25
    ETA: ClassVar = 1
    BATCH: ClassVar = 2
    END: ClassVar = 40
    ATTEMPTS: ClassVar = 3
    PROMPTS: ClassVar = 7
    LIMIT: ClassVar = 12
    RESERVED: ClassVar = 5

    def __init__(self, wide: bool = False) -> None:
        self.now = 1000.0
        self.set_back = 0.0  # what the server's clock lacks, in seconds
        self.wide, self.factor = wide, 1.5 if wide else 1.0
        self.version = self.step = self.durable = self.attempt_base = 0
        self.line = [0]  # the version of each step, from the initial weights on
        self.lost: list[tuple[int, int]] = []
        self.records: dict[int, Record] = {}
        self.members: dict[str, float] = {}
        self.granted: dict[str, list[int]] = {}
        self.unwanted: set[int] = set()

    @property
    def low(self) -> int:
        """The lowest ticket that is not issued."""
        return next(number for number in itertools.count() if number not in self.records)

    def age(self, version: int) -> int:
        return age(self.version, version, self.lost)

    def close(self, record: Record, state: str, reason: str) -> None:
        record.state, record.reason, record.owner, record.partial = state, reason, "", (0, b"")

    def reissue(self, record: Record, reason: str, wait: float = 0, blamed: bool = True, to: str = "") -> None:
        if blamed and record.tries + 1 >= self.ATTEMPTS:
            self.close(record, "failed", reason)
            return
        if blamed and reason != "lease_lost":
            record.partial = (0, b"")
        record.state, record.owner, record.stamps, record.to = "issued", "", (0, 0, record.partial[0]), to
        record.attempt, record.tries = record.attempt + 1, record.tries + blamed
        record.retry_at = self.now + wait

    def dismiss(self, owner: str, blamed: bool) -> None:
        for record in self.records.values():
            if record.owner == owner and record.state in FLIES:
                self.reissue(record, "lease_lost", blamed=blamed)
        self.members.pop(owner, None)
        self.granted.pop(owner, None)

    def expire(self) -> None:
        for owner in [owner for owner, end in self.members.items() if end <= self.now]:
            self.dismiss(owner, True)
        for record in self.records.values():
            if record.state in ("rolling", "scored") and record.deadline <= self.now:
                self.reissue(record, "deadline")

    def held(self, number: int, attempt: int) -> Record:
        if number not in self.records:
            raise FencedError
        record = self.records[number]
        if record.attempt != attempt or (record.state == "trained" and record.step <= self.durable):
            raise FencedError
        return record

    def owner_of(self, number: int) -> str:
        return self.records[number].owner if number in self.records else ""

    def owned(self, number: int, attempt: int, owner: str) -> Record:
        record = self.held(number, attempt)
        if record.owner not in ("", owner):
            raise FencedError
        return record

    def admit(self, owner: str, count: int, served: int, lost: bool, named: bool) -> list[Ticket]:
        self.expire()
        if owner not in self.members:
            raise MemberExpired
        given = []
        if lost:
            given = [n for n in self.granted.get(owner, []) if self.records[n].state == "rolling"]
            given = [n for n in given if self.records[n].owner == owner]
        if served <= self.version and self.age(served) <= self.ETA:
            started, left = [], max(0, count - len(given))
            flying, stored = self.open_groups()
            room = self.room(self.age(served), flying, stored)
            if self.age(served) == 0 or room >= 0:
                started = [number for number in self.waiting(owner) if self.named(number, owner, named)][:left]
            for number in started:
                self.start(self.records[number], owner, served)
            room = min(left - len(started), self.cap - flying - stored, room)
            for number in [] if named else self.issue(room):
                self.records[number] = Record(attempt=self.attempt_base)
                self.start(self.records[number], owner, served)
                started.append(number)
            given += started
        self.granted[owner] = given
        found = [(number, self.records[number]) for number in given]
        return [Ticket(n, r.attempt, r.admitted, r.deadline, r.partial[1]) for n, r in found]

    @property
    def cap(self) -> int:
        return math.ceil((self.ETA + 1) * self.BATCH * self.factor)

    def open_groups(self) -> tuple[int, int]:
        states = [record.state for record in self.records.values() if record.state in OPEN]
        stored = sum(state in ("buffered", "taken") for state in states)
        return len(states) - stored, stored

    def room(self, lag: int, flying: int, stored: int) -> int:
        room = math.ceil(self.factor * ((self.ETA + 1 - lag) * self.BATCH - stored)) - flying
        return max(room, self.BATCH - flying - stored) if lag == 0 else room

    def waiting(self, owner: str) -> list[int]:
        found = [n for n, r in self.records.items() if r.state == "issued" and r.retry_at <= self.now]
        free = [n for n in found if self.is_free_for(self.records[n], owner)]
        return sorted(free, key=lambda n: (self.records[n].retry_at, str(n)))

    def is_free_for(self, record: Record, owner: str) -> bool:
        late = self.now >= record.retry_at + self.RESERVED
        return record.to in ("", owner) or late or record.to not in self.members

    def named(self, number: int, owner: str, named: bool) -> bool:
        return self.records[number].to == owner or not named

    def start(self, record: Record, owner: str, served: int) -> None:
        if record.partial[0] and self.wide and self.age(record.admitted) > self.ETA:
            record.partial, record.stamps = (0, b""), (0, 0, 0)
        older = record.partial[0] and self.age(record.admitted) > self.age(served)
        record.admitted = record.admitted if older else served
        record.state, record.owner, record.to = "rolling", owner, ""
        record.deadline = self.now + self.DEADLINE

    def issue(self, room: int) -> list[int]:
        return list(range(self.low, min(self.low + room, self.END)))

    def hand_over(self, number: int, attempt: int, owner: str, tokens: int, to: str, blob: bytes) -> bool:
        asked = (attempt, "/over", True)
        if number in self.records and not self.folded(number) and asked in self.records[number].answers:
            return bool(self.records[number].answers[asked])
        record = self.owned(number, attempt, owner)
        if record.state not in FLIES:
            raise FencedError
        others = sum(len(each.partial[1]) for each in self.records.values() if each is not record)
        fits = tokens > 0 and others + len(blob) <= self.LIMIT
        if fits:
            record.partial = (tokens, blob)
        record.answers = {asked: fits}
        self.reissue(record, "handed_over", blamed=False, to=to)
        return fits

    def folded(self, number: int) -> bool:
        record = self.records[number]
        return record.state == "trained" and record.step <= self.durable

    def flying(self) -> list[tuple[int, int]]:
        states = ("rolling", "scored")
        return sorted(Counter(r.admitted for r in self.records.values() if r.state in states).items())

    def scored(self, number: int, attempt: int, owner: str, tokens: int) -> None:
        record = self.owned(number, attempt, owner)
        if record.state == "rolling":
            record.state, record.stamps = "scored", (0, 0, tokens)
            record.deadline = self.now + self.DEADLINE
        elif record.state in ("issued", "dropped", "failed"):
            raise FencedError

    def buffered(self, number: int, attempt: int, owner: str, stamps: tuple[int, int, int]) -> None:
        record = self.owned(number, attempt, owner)
        if record.state in ("buffered", "taken", "trained"):
            if record.stamps != stamps:
                raise FencedError
        elif record.state not in ("rolling", "scored"):
            raise FencedError
        elif stamps[1] > self.version:
            raise StalenessError
        else:
            record.state, record.stamps, record.partial = "buffered", stamps, (0, b"")

    def mislaid(self, number: int, attempt: int, state: str) -> list[int]:
        """Said to be stored, or scored, and nowhere."""
        record = self.records.get(number)
        if record is None or (record.attempt, record.state) != (attempt, state):
            return []
        self.reissue(record, "lost", blamed=False)
        return [number]

    def fail(self, number: int, attempt: int, owner: str, reason: str, retry: bool) -> Failure:
        asked = (attempt, reason, retry)
        if number in self.records and not self.folded(number) and asked in self.records[number].answers:
            found: Failure = self.records[number].answers[asked]
            return found
        record = self.owned(number, attempt, owner)
        if record.state not in FLIES:
            raise FencedError
        wait = 2.0**record.tries
        if retry:
            self.reissue(record, reason, wait)
        else:
            self.close(record, "failed", reason)
        at = record.retry_at if record.state == "issued" else 0
        answer = Failure(record.state, record.attempt, at)  # type: ignore[arg-type]
        record.answers = {asked: answer}
        return answer

    def drop(self, number: int, attempt: int, owner: str, reason: str) -> None:
        record = self.owned(number, attempt, owner or self.owner_of(number))
        if record.state == "dropped" and record.reason == reason:
            return
        if record.state not in ("rolling", "scored", "buffered"):
            raise FencedError
        self.close(record, "dropped", reason)

    def drop_by_hand(self, number: int) -> str:
        if number not in self.records or self.folded(number):
            raise FencedError
        record = self.records[number]
        if record.state == "taken":
            self.unwanted.add(number)
        elif record.state in ("issued", "rolling", "scored", "buffered"):
            self.close(record, "dropped", "by_hand")
        elif record.reason != "by_hand":
            raise FencedError
        return record.state

    def leave_unwanted(self) -> None:
        """Those that are in no step any longer, though a person wants them out."""
        for number in [number for number in self.unwanted if self.records[number].state != "taken"]:
            self.unwanted.remove(number)
            if self.records[number].state == "buffered":
                self.close(self.records[number], "dropped", "by_hand")

    def take(self, tickets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.expire()
        for number, attempt in tickets:
            if number in self.records:
                record = self.records[number]
                if record.attempt == attempt and record.state == "buffered":
                    record.state, record.step = "taken", self.step + 1
        known = [(n, a) for n, a in tickets if n in self.records]
        return [(n, a) for n, a in known if self.records[n].attempt == a and self.records[n].state == "taken"]

    def back(self, after: int) -> None:
        for record in self.records.values():
            if record.step > after:
                record.state, record.step = "buffered", 0
        self.leave_unwanted()

    def set_aside(self, groups: list[tuple[int, int, str, bool, bool]]) -> None:
        for number, attempt, reason, again, failed in groups:
            record = self.records.get(number)
            if record is None or record.attempt != attempt or record.state not in ("buffered", "taken"):
                continue
            record.step = 0
            if number in self.unwanted:
                self.unwanted.remove(number)
                reason, again, failed = "by_hand", False, False
            if again and record.tries + 1 < self.ATTEMPTS:
                self.reissue(record, reason)
            else:
                self.close(record, "failed" if failed else "dropped", reason)
        self.back(self.step)

    def commit(self, version: int, named: list[int] | None = None, idle: Sequence[int] = ()) -> None:
        if version != self.version + 1:
            raise LedgerError
        taken = [record for record in self.records.values() if record.state == "taken"]
        if not taken and not named:
            raise LedgerError
        trained = taken if named is None else [self.records[number] for number in named]
        for record in taken:
            record.state, record.step = "buffered", 0
        for record in trained:
            record.state, record.step = "trained", self.step + 1
        for number in idle:
            self.close(self.records[number], "dropped", "nonfinite")
        self.leave_unwanted()
        self.step, self.version = self.step + 1, version
        self.line.append(version)

    def rollback(self, step: int) -> None:
        if step < self.durable:
            raise LedgerError
        self.back(step)
        if step < self.step and self.line[step] < self.version:
            self.lost.append((self.line[step] + 1, self.version))
            self.version += 1  # the weights that were kept are published anew
        self.step, self.line = step, [*self.line[:step], self.version]

    def restore(self) -> None:
        self.attempt_base = max(self.attempt_base + 1, int(self.now))
        self.members, self.granted, self.unwanted = {}, {}, set()
        for record in self.records.values():
            if record.state in ("issued", "rolling", "scored"):
                record.state, record.owner, record.stamps = "issued", "", (0, 0, 0)
                record.partial, record.to = (0, b""), ""
                record.attempt, record.retry_at = self.attempt_base, self.now
            if record.state == "taken":
                record.state, record.step = "buffered", 0


def outcome(call: Callable[[], Any]) -> Any:
    """The call's value, or the type of the refusal."""
    try:
        return call()
    except (LedgerError, StalenessError) as error:
        return type(error)


class Twin:
    """A run on the ledger and in the model; every call is made in both worlds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.model = Model(wide=next(_examples) % 2 == 1)
        self.again: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.answer: Any = None
        self.ledger = self.open()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def close(self) -> None:
        self.run(self.ledger.close())
        self.runner.close()

    def move(self) -> None:
        """The server is lost, and the run goes on from a snapshot on an empty one."""
        snapshot = self.run(self.ledger.snapshot())
        self.model.set_back = 0.0
        self.run(self.ledger.close())
        self.ledger = self.open(snapshot)

    def open(self, snapshot: bytes | None = None) -> Ledger:
        run = f"model-{os.getpid()}-{next(_examples)}"
        terms = RunTerms(
            run_id="r",
            dataset_fingerprint="d",
            prompts=self.model.PROMPTS,
            policy="drop" if self.model.wide else "token",
            oversampling=self.model.factor,
            seed=0,
            max_staleness=self.model.ETA,
            groups_per_step=self.model.BATCH,
            max_attempts=self.model.ATTEMPTS,
            end_ticket=self.model.END,
            ticket_deadline_s=self.model.DEADLINE,
        )

        async def opening() -> Ledger:
            ledger = await Ledger.connect(self.url, run, now=lambda: self.model.now - self.model.set_back)
            if snapshot is not None:
                await ledger.restore(snapshot)
            await ledger.open_run(terms)
            await ledger.claim_learner("L0")
            return ledger

        return self.run(opening())

    def both(self, real: Callable[[], Coroutine[Any, Any, Any]], model: Callable[[], Any]) -> Any:
        """Do it in both worlds; a call that succeeded may be repeated later."""
        expected = outcome(model)
        got = outcome(lambda: self.run(real()))
        assert got == expected
        self.again, self.answer = (None, None) if isinstance(got, type) else (real, got)
        return got

    def attempt_of(self, number: int, lag: int) -> int:
        known = number in self.model.records
        return self.model.records[number].attempt - lag if known else self.model.attempt_base

    def owner_of(self, number: int, foreign: bool = False) -> str:
        """Who rolls or has rolled the ticket, or somebody else."""
        return "g9" if foreign else self.model.owner_of(number) or "g0"

    def check_books(self) -> None:
        audit = self.run(self.ledger.audit())
        assert audit.problems == []
        book = msgspec.msgpack.decode(self.run(self.ledger.snapshot()), type=Snapshot)
        assert (int(book.run["version"]), int(book.run["step"])) == (self.model.version, self.model.step)
        assert int(book.run["next"]) == len(self.model.records)
        found = {int(record["number"]): record for record in book.records}
        for number, record in self.model.records.items():
            if self.model.folded(number):
                assert number not in found
            else:
                row = found.pop(number)
                assert (int(row["tokens"]), int(row["partial"])) == (record.stamps[2], record.partial[0])
                names = ("state", "attempt", "tries", "owner", "reason", "step", "to")
                assert [row[name] for name in names] == [str(getattr(record, name)) for name in names]
        assert not found


@pytest.fixture
def twin_type(server: Any) -> Callable[[], Twin]:
    """Makes a run in both worlds."""
    return lambda: Twin(server.url)
