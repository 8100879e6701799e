"""A ledger of a few dictionaries, made-up groups, and the buffer's parts over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.buffer.arrivals import Arrivals
from slipstream.buffer.dropped_shown import show_nothing
from slipstream.buffer.offers import Offers
from slipstream.buffer.store import Store
from slipstream.config.load import build
from slipstream.config.schema import Config
from slipstream.contract import Contract, GroupTerms
from slipstream.errors import FencedError, LedgerError
from slipstream.ledger.records import Folded, Standing
from slipstream.protocol.messages import Frame, Group, GroupArrays, Sample, encode_group
from slipstream.protocol.questions import Fetch, Offer
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.telemetry.sample_log import SampleLog


@dataclass
class FakeLedger:
    """The ledger's side of what a buffer does: a state and an attempt for each ticket."""

    states_of: dict[int, str] = field(default_factory=dict)
    attempts_of: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    shards: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    covered: list[tuple[int, int]] = field(default_factory=list)
    away: bool = False
    deaf: bool = False  # it does what it is told, and its answers get lost
    calls: int = 0
    learner: str = "l"
    refusing: Exception | None = None
    owners: list[str] = field(default_factory=list)  # in whose name it was told

    def fly(self, *tickets: int, attempt: int = 0) -> None:
        for ticket in tickets:
            self.states_of[ticket], self.attempts_of[ticket] = "scored", attempt

    def _held(self, ticket: int, attempt: int) -> None:
        if self.away:
            raise LedgerError("the ledger did not answer")
        if self.attempts_of.get(ticket) != attempt or self.states_of[ticket] in ("dropped", "failed"):
            raise FencedError(f"ticket {ticket} is at attempt {self.attempts_of.get(ticket)}, not {attempt}")

    async def buffered_all(self, groups: Sequence[Any]) -> list[Exception | None]:
        if self.away:
            raise LedgerError("the ledger did not answer")
        self.calls += 1
        answers = [self._buffered(*group) for group in groups]
        if self.deaf:
            raise LedgerError("the ledger did not answer")
        return answers

    def _buffered(self, ticket: int, attempt: int, owner: str, shard: str, *facts: Any) -> Exception | None:
        self.owners.append(owner)
        if self.refusing is not None:
            return self.refusing
        try:
            self._held(ticket, attempt)
        except FencedError as error:
            return error
        if self.states_of[ticket] == "scored":
            self.states_of[ticket] = "buffered"
            self.shards[ticket], self.sizes[ticket] = shard, facts[-1]
        return None

    async def drop(self, ticket: int, attempt: int, reason: str, tokens: int, owner: str) -> None:
        self.owners.append(owner)
        self._held(ticket, attempt)
        self.states_of[ticket], self.reasons[ticket] = "dropped", reason

    async def states(self, tickets: Sequence[int]) -> dict[int, str]:
        if self.deaf:
            raise LedgerError("the ledger did not answer")
        return {ticket: self.states_of[ticket] for ticket in tickets if ticket in self.states_of}

    async def attempts(self, tickets: Sequence[int]) -> dict[int, int]:
        if self.away:
            raise LedgerError("the ledger did not answer")
        return {ticket: self.attempts_of[ticket] for ticket in tickets if ticket in self.attempts_of}

    async def stored(self) -> list[tuple[int, int, str]]:
        return [
            (ticket, self.attempts_of[ticket], self.shards.get(ticket, "0"))
            for ticket, state in self.states_of.items()
            if state == "buffered"
        ]

    async def standing(self) -> list[Standing]:
        flies = ("rolling", "scored", "buffered", "taken", "trained")
        return [
            Standing(ticket, self.attempts_of[ticket], self.shards.get(ticket, ""), state)
            for ticket, state in self.states_of.items()
            if state in flies
        ]

    async def mislaid(self, tickets: Sequence[tuple[int, int]]) -> list[int]:
        for ticket, attempt in tickets:
            assert (self.states_of[ticket], self.attempts_of[ticket]) == ("scored", attempt)
            self.states_of[ticket], self.attempts_of[ticket] = "issued", attempt + 1
        return [ticket for ticket, _ in tickets]

    async def give_back(self, shard: str, tickets: Sequence[tuple[int, int]]) -> list[int]:
        for ticket, attempt in tickets:
            assert (self.states_of[ticket], self.attempts_of[ticket]) == ("buffered", attempt)
            self.states_of[ticket], self.attempts_of[ticket] = "issued", attempt + 1
        return [ticket for ticket, _ in tickets]

    async def state(self) -> SimpleNamespace:
        return SimpleNamespace(learner=self.learner)

    async def folded(self, since: int) -> Folded:
        return Folded(since + 1, self.covered)


MakeGroup = Callable[..., tuple[Group, list[Frame]]]


def group_of(
    ticket: int,
    attempt: int = 0,
    rewards: Sequence[float | None] = (1.0, 0.0),
    version: int = 0,
    run: str = "r",
) -> tuple[Group, list[Frame]]:
    """A scored group of samples with two tokens each, and its frames."""
    samples = [
        Sample(
            tokens=2,
            finish="stop",
            versions=[(version, 2)],
            text="",
            reward=reward,
            unscored="" if reward is not None else "exception",
        )
        for reward in rewards
    ]
    group = Group(
        run=run,
        ticket=ticket,
        attempt=attempt,
        prompt_index=ticket,
        owner="rollout-0",
        admitted_version=version,
        samples=samples,
    )
    count = 2 * len(samples)
    arrays = GroupArrays(
        prompt_ids=np.array([ticket], np.int32),
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -1.0, np.float32),
    )
    return group, encode_group(group, arrays)


@pytest.fixture
def make_group() -> MakeGroup:
    return group_of


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "buffer" / "b.sqlite")


@pytest.fixture
def metrics() -> BufferMetrics:
    return BufferMetrics()


@pytest.fixture
def contract() -> Contract:
    return Contract(GroupTerms(run="r"))


@pytest.fixture
def poison(tmp_path: Path) -> AsideLog:
    return AsideLog(SampleLog(tmp_path / "poison.jsonl", 1.0))


@pytest.fixture
def make_config() -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, Any] = {
            "run": {"name": "r", "steps": 10},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "batch": {"groups": 2, "group_size": 2},
            "staleness": {"policy": "pace", "max_staleness": 1},
        }
        return build(tree | sections)[0]

    return make


@pytest.fixture
def make_offers(
    ledger: FakeLedger,
    store: Store,
    metrics: BufferMetrics,
    make_config: Callable[..., Config],
    contract: Contract,
    poison: AsideLog,
) -> Callable[..., Offers]:
    def make(index: int = 0, dropped: Any = show_nothing, **sections: dict[str, Any]) -> Offers:
        config = make_config(**sections)
        return Offers(config, contract, ledger, store, index, metrics, poison, dropped)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_intake(
    ledger: FakeLedger,
    store: Store,
    metrics: BufferMetrics,
    make_config: Callable[..., Config],
    contract: Contract,
) -> Callable[..., Arrivals]:
    def make(offers: Offers, **sections: dict[str, Any]) -> Arrivals:
        config = make_config(**sections)
        parts = (offers.quota, offers.shelve, offers.doubt, metrics)
        return Arrivals(config, contract, ledger, store, "0", *parts)  # type: ignore[arg-type]

    return make


@pytest.fixture
def ask() -> Callable[..., list[bytes]]:
    """Frames of an offer."""

    def make(learner: str = "l", run: str = "r", **more: Any) -> list[bytes]:
        return [msgspec.msgpack.encode(Offer(run=run, learner=learner, **more))]

    return make


@pytest.fixture
def fetch() -> Callable[..., list[bytes]]:
    """Frames of a fetch."""

    def make(*tickets: int, run: str = "r", learner: str = "l") -> list[bytes]:
        return [msgspec.msgpack.encode(Fetch(run=run, learner=learner, tickets=list(tickets)))]

    return make
