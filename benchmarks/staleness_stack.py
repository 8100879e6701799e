"""A whole stack in one process and in simulated time: what is real, and what stands in for a model.

Real: the ledger on its Valkey server, the rollout service with its roller and episodes, the queues (the in-process
twin), the reward service, the buffer's intake, offers and SQLite store, the learner's draw and its commits.
Simulated: decoding (a time for each token, by the rows at work), the optimizer's step (a sleep), scoring (a
constant), and the way of the weights (a replica swaps at its loop's next turn, 50 ms at most).
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from benchmarks.staleness_engine import FlowingEngine
from benchmarks.virtual import VirtualLoop
from slipstream.buffer.arrivals import Arrivals
from slipstream.buffer.offers import Offers
from slipstream.buffer.service import answer
from slipstream.buffer.store import Store
from slipstream.config.load import build
from slipstream.config.schema import Config
from slipstream.contract import Contract, contract_of
from slipstream.learner.descent import Line
from slipstream.learner.intake.draw import Batch, Draw, Waiting
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Member, RunTerms
from slipstream.lifecycle.directory import Directory
from slipstream.lifecycle.life import Life
from slipstream.prompts.order import EpochOrder, Permutation
from slipstream.prompts.sets import Prompt
from slipstream.reward.service import RewardService
from slipstream.rewards.base import Scored
from slipstream.rollout.engines.simulated import SimulatedEngine
from slipstream.rollout.engines.simulated_config import SimulatedConfig
from slipstream.rollout.episode import seeds_of
from slipstream.rollout.roller import Roller
from slipstream.rollout.service import Rollout
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.metrics import BufferMetrics, LearnerMetrics, RewardMetrics, RolloutMetrics
from slipstream.telemetry.sample_log import SampleLog
from slipstream.transport.base import Peer, Receiver, ReceiverOptions, Sender, SenderOptions
from slipstream.transport.memory import Hub
from slipstream.transport.origin import Origin

SLOTS, BATCH, MEAN, CAP = 64, 64, 64, 8
TOKEN_SECONDS = 1 / 8
PROMPTS = 1024
CREDITS = 200
NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: `floor` is the share of a decode step's time that does not depend on the rows in it, `same` the share
    of the (log-)length's variance that belongs to the prompt and comes back in the next epoch."""

    policy: str = "token"
    eta: int = 4
    sigma: float = 1.0
    steps: int = 60
    floor: float = 1.0
    same: float = 0.8
    order: str = "fifo"
    express: int = 0
    express_sequences: int = 8
    replicas: int = 4
    seed: int = 0

    def config(self, name: str) -> Config:
        """The run's config."""
        tree = {
            "run": {"name": name, "steps": self.steps, "seed": self.seed},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "batch": {"groups": BATCH, "group_size": 1},
            "objective": {"advantage": "reinforce"},
            "sampling": {"max_new_tokens": CAP * MEAN},
            "staleness": {
                "policy": self.policy,
                "max_staleness": self.eta,
            },
            "buffer": {"order": self.order, "sync": False},
            "rollout": {
                "engine": {"kind": "simulated", "max_sequences": SLOTS // self.replicas},
                "express": self.express,
                "express_sequences": self.express_sequences,
                "ticket_seconds": 1e6,
            },
        }
        return build(tree)[0]

    def length(self, prompt: int, seed: int) -> int:
        """Tokens of a sample: log-normal, cut at the cap, partly the prompt's own.

        The prompts' parts are the quantiles of the normal distribution, so each epoch has its share of long ones.
        """
        z = math.sqrt(self.same) * _own(self.seed)[prompt] + math.sqrt(1 - self.same) * random.Random(
            seed
        ).gauss(0, 1)
        return max(1, min(CAP * MEAN, round(MEAN * math.exp(self.sigma * z - self.sigma**2 / 2))))

    def lengths(self, tickets: int) -> list[int]:
        """Lengths of the first so many tickets, in their order."""
        order = EpochOrder(PROMPTS, self.seed)
        return [self.length(order.at(n)[1], _seed(self.seed, n)) for n in range(tickets)]

    def step_seconds(self) -> float:
        """Time of an optimizer step, equal to that of decoding a batch with all slots in use: the limit is both.

        Taken from the very lengths of the run: where both are equal, a percent decides how long groups wait.
        """
        return _mean_length(self) * BATCH / SLOTS * TOKEN_SECONDS


@lru_cache
def _own(seed: int) -> list[float]:
    """Each prompt's own part of its length, in standard deviations."""
    order = Permutation(PROMPTS, f"lengths/{seed}")
    return [NORMAL.inv_cdf((order[prompt] + 0.5) / PROMPTS) for prompt in range(PROMPTS)]


@cache
def _seed(run_seed: int, ticket: int) -> int:
    return seeds_of(run_seed, ticket, 1)[0]


@lru_cache
def _mean_length(case: Case) -> float:
    return statistics.fmean(case.lengths(case.steps * BATCH))


def _engine(case: Case) -> FlowingEngine:
    slots = SLOTS // case.replicas
    fixed, each = TOKEN_SECONDS * case.floor, TOKEN_SECONDS * (1 - case.floor) / slots
    config = SimulatedConfig(slots=slots, step_seconds=fixed, row_seconds=each)
    return FlowingEngine(config, case.length)


@dataclass
class Weights:
    """Nothing but a version."""

    version: int
    tensors: Any = None

    def release(self) -> None:
        """Nothing to unmap."""


class Prompts(list[Prompt]):
    """A set that is shuffled anew in each epoch."""

    shuffled = True


def _prompts() -> Prompts:
    return Prompts(Prompt(index, "", (index,), {}, CAP * MEAN) for index in range(PROMPTS))


class Scorers:
    """Every sample is worth one."""

    async def score_group(self, prompt: str, texts: Sequence[str], columns: Any, beside: Any) -> list[Scored]:
        """Score at once."""
        return [Scored(1.0, {}) for _ in texts]


class Follower:
    """Has the newest version at hand at any time."""

    swap_seconds = 0.0

    def __init__(self, stack: Stack, engine: SimulatedEngine) -> None:
        self._stack, self._engine = stack, engine

    async def swap_if_newer(self) -> bool:
        """Swap at once."""
        if self._engine.version == self._stack.version:
            return False
        await self._engine.swap(Weights(self._stack.version))
        return True

    async def trusted(self) -> bool:
        """Weights that are a number are what they say."""
        return True

    def note(self) -> dict[str, Any]:
        """Nothing for others to see."""
        return {}


class Stack:
    """The processes of a run as tasks of one loop; `version` is the newest published."""

    def __init__(self, case: Case, config: Config, ledger: Ledger, hub: Hub, life: Life) -> None:
        self.case, self.config, self.ledger, self.hub, self.life = case, config, ledger, hub, life
        self.version = 0
        self.sender: Sender
        self.contract: Contract
        self._open = AsyncExitStack()

    async def start(self, folder: Path, stack: AsyncExitStack) -> None:
        """Start every role but the learner."""
        options = ReceiverOptions(credits=CREDITS, silent_seconds=math.inf)  # nobody pings, and nobody is gone
        buffer = await stack.enter_async_context(self.hub.make_receiver(options))
        reward = await stack.enter_async_context(self.hub.make_receiver(options))
        self.sender = await self._sender("learner", "L", "buffer-0", buffer, stack)
        directory = Directory(self.ledger)
        metrics = BufferMetrics()
        store = Store(folder / "0.sqlite", sync=False)
        stack.callback(store.close)
        self.contract = contract = contract_of(self.config, (await self.ledger.state()).terms)
        poison = AsideLog(SampleLog(folder / "poison.jsonl", 1.0))
        offers = Offers(self.config, contract, self.ledger, store, 0, metrics, poison)
        await offers.catch_up()
        intake = Arrivals(
            self.config, contract, self.ledger, store, "0", offers.quota, offers.shelve, offers.doubt, metrics
        )
        self.life.watch("intake", intake.run())
        self.life.watch("housekeeping", offers.keep_house(self.life))
        self.life.watch(
            "buffer", self._each(buffer, lambda delivery: answer(delivery, intake, offers, directory))
        )
        scoring = RewardService(
            self.config,
            contract,
            self.ledger,
            directory,
            Scorers(),  # type: ignore[arg-type]
            await self._sender("reward", "a", "buffer-0", buffer, stack),
            RewardMetrics(),
        )
        self.life.watch("reward", self._each(reward, scoring.serve))
        for number in range(self.case.replicas):
            name = f"r{number}"
            await self._replica(name, await self._sender(name, "a", "reward-0", reward, stack), stack)

    async def _sender(
        self, name: str, incarnation: str, peer: str, receiver: Receiver, stack: AsyncExitStack
    ) -> Sender:
        """A member's sender; those that are no generators join here, and need no heartbeat."""
        if name in ("learner", "reward"):
            await self.ledger.join(Member(id=name, role=name, incarnation=incarnation, ttl_s=1e6))
        options = SenderOptions(ping_seconds=1e6, origin=Origin(name, incarnation))
        sender = await stack.enter_async_context(self.hub.make_sender(options))
        sender.set_peers({peer: Peer(receiver.endpoint)})
        return sender

    async def _each(self, receiver: Receiver, serve: Any) -> None:
        async for delivery in receiver:
            self.life.watch("serve", serve(delivery), endless=False)

    async def _replica(self, name: str, sender: Sender, stack: AsyncExitStack) -> None:
        engine, metrics = _engine(self.case), RolloutMetrics()
        await engine.start()
        stack.push_async_callback(engine.close)
        await engine.swap(Weights(0))
        tokenizer: Any = SimpleNamespace(stop_ids=(), decode=lambda ids: "")
        parts: Any = SimpleNamespace(
            config=self.config,
            name=name,
            site=SimpleNamespace(join=lambda served, **_: self._join(name, served, metrics)),
            ledger=self.ledger,
            engine=engine,
            follower=Follower(self, engine),
            roller=Roller(self.config, self.contract, engine, sender, tokenizer, metrics),
            prompts=_prompts(),
            evaluations={},
            metrics=metrics,
        )
        self.life.watch(name, Rollout(parts, self.life).run())

    async def _join(self, name: str, served: Any, metrics: RolloutMetrics) -> None:
        await self.ledger.join(Member(id=name, role="rollout", incarnation="a", ttl_s=1e6))
        self.life.watch(f"heartbeat {name}", self._beat(name, served, metrics))

    async def _beat(self, name: str, served: Any, metrics: RolloutMetrics) -> None:
        while True:
            await self.ledger.heartbeat(name, served(), metrics.detail())
            await asyncio.sleep(1.0)

    async def batches(self) -> AsyncIterator[tuple[int, Batch]]:
        """The learner: yields (version, batch) as each step begins, and goes on after the time of a step."""
        parts: Any = SimpleNamespace(
            config=self.config,
            ledger=self.ledger,
            learner="L",
            prompts=_prompts(),
            sender=self.sender,
            contract=self.contract,
            poison=None,
            metrics=LearnerMetrics(),
        )
        draw, seconds = Draw(parts), self.case.step_seconds()
        for step in range(1, self.case.steps + 1):
            while isinstance(drawn := await draw.batch(Line(step - 1, step - 1)), Waiting):
                if drawn.trouble:
                    await asyncio.sleep(0.2)
            assert drawn is not None
            yield step - 1, drawn
            await asyncio.sleep(seconds)
            await self.ledger.commit(step, step, "L", [(group.ticket, group.attempt) for group, _ in drawn])
            self.version = step
            if step % 10 == 0:
                await self.ledger.durable(step, "L")
        await draw.close()


@asynccontextmanager
async def stack_of(case: Case, url: str, name: str, folder: Path, loop: VirtualLoop) -> AsyncIterator[Stack]:
    """A started stack on a ledger's server; it is gone afterwards."""
    async with AsyncExitStack() as stack:
        ledger = await loop.real(Ledger.connect(url, name, now=lambda: 1e6 + loop.now))
        stack.push_async_callback(ledger.close)
        call = ledger._book._send
        ledger._book._send = lambda command: loop.real(call(command))  # type: ignore[method-assign]
        terms = RunTerms(
            run_id=name,
            dataset_fingerprint="lengths",
            prompts=PROMPTS,
            seed=case.seed,
            policy=case.policy,  # type: ignore[arg-type]
            max_staleness=case.eta,
            groups_per_step=BATCH,
            ticket_deadline_s=1e6,
        )
        await ledger.open_run(terms)
        await ledger.claim_learner("L")
        life = Life()
        made = Stack(case, case.config(name), ledger, Hub(), life)
        await made.start(folder, stack)
        stack.push_async_callback(life.end_tasks)
        yield made
