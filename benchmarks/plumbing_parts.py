"""The two ends of the plumbing benchmark: a rollout that samples nothing, and a learner that computes nothing.

Between them stand the real reward and buffer services in their own processes, and all of them use the real ledger,
queues and draw. Started by `benchmarks.plumbing`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.contract import contract_of
from slipstream.learner.descent import Line
from slipstream.learner.intake.draw import Draw
from slipstream.ledger.records import RunTerms, Ticket
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.process import run_process
from slipstream.lifecycle.site import open_site
from slipstream.prompts.order import EpochOrder
from slipstream.prompts.sets import Prompt
from slipstream.protocol.messages import Frame, Group, GroupArrays, Sample, encode_group
from slipstream.telemetry.metrics import LearnerMetrics, RolloutMetrics
from slipstream.transport.base import OK, Parcel

SAMPLES, TOKENS, PROMPT = 8, 1024, 64
PROMPTS, SEED = 1_000_000, 0
TEXT, COLUMNS = "What is 0 + 1?", {"answer": "1"}
ORDER = EpochOrder(PROMPTS, SEED)
WARM_STEPS = 5
IDLE_SECONDS = 0.02  # as a replica that is given nothing
SAVE_EVERY = 5  # steps between the checkpoints that let the buffer forget


def say(**values: object) -> None:
    """One line for the parent."""
    print(json.dumps(values), flush=True)


def group_of(config: Config, ticket: Ticket, arrays: GroupArrays) -> list[Frame]:
    """A group as a rollout replica sends it; half of its samples are right."""
    samples = [
        Sample(tokens=TOKENS, finish="stop", versions=[(ticket.admitted_version, TOKENS)], text=str(index % 2))
        for index in range(SAMPLES)
    ]
    epoch, index = ORDER.at(ticket.number)
    group = Group(
        run=config.run.name or "",
        ticket=ticket.number,
        attempt=ticket.attempt,
        prompt_index=index,
        epoch=epoch,
        owner="rollout-0",
        admitted_version=ticket.admitted_version,
        samples=samples,
        prompt=TEXT,
        columns=COLUMNS,
    )
    return encode_group(group, arrays)


def made_up_arrays() -> GroupArrays:
    """Ids and logprobs of one group."""
    dice = np.random.default_rng(0)
    return GroupArrays(
        prompt_ids=dice.integers(0, 50_000, PROMPT, dtype=np.int32),
        token_ids=dice.integers(0, 50_000, SAMPLES * TOKENS, dtype=np.int32),
        logprobs=-dice.random(SAMPLES * TOKENS, dtype=np.float32),
    )


class Prompts:
    """A million rows that are the same."""

    shuffled = True

    def __init__(self) -> None:
        self._prompt_ids = tuple(made_up_arrays().prompt_ids.tolist())

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, TEXT, self._prompt_ids, COLUMNS, TOKENS)


class Rollout:
    """Takes tickets and delivers groups, `at_once` at a time; notes each one's time from admission to stored."""

    def __init__(self, config: Config, at_once: int) -> None:
        self._config = config
        self._at_once = at_once
        self._arrays = made_up_arrays()
        self._version = 0
        self._free = asyncio.Semaphore(at_once)
        self.latencies: list[float] = []

    async def service(self, life: Life) -> None:
        """Run until asked to stop, then tell the latencies."""
        async with AsyncExitStack() as stack:
            site = await open_site(self._config, "rollout-0", "rollout", RolloutMetrics(), life, stack)
            self._sender = await site.sender(to="reward")
            await site.ledger.state(wait_s=120)
            await site.join(served=lambda: self._version)
            life.drains()
            life.watch("version", self._follow(site.ledger, life))
            while not life.stopping:
                await self._admit(site.ledger, life)
        tell = sorted(self.latencies)
        cut = statistics.quantiles(tell, n=100) if len(tell) > 1 else [0.0] * 99
        say(event="latency", count=len(tell), p50_ms=cut[49] * 1e3, p99_ms=cut[98] * 1e3)

    async def _admit(self, ledger: Any, life: Life) -> None:
        async with self._free:
            room = 1 + self._free._value
        tickets = await ledger.admit("rollout-0", min(room, self._at_once), self._version)
        admitted = time.perf_counter()
        for ticket in tickets:
            await self._free.acquire()
            life.watch("deliver", self._deliver(ticket, admitted), endless=False)
        if not tickets:
            await asyncio.sleep(IDLE_SECONDS)

    async def _deliver(self, ticket: Ticket, admitted: float) -> None:
        try:
            frames = group_of(self._config, ticket, self._arrays)
            parcel = Parcel(f"t{ticket.number}.{ticket.attempt}", "group", frames)
            reply = await self._sender.deliver(parcel, 60.0)
            assert reply.status == OK, reply
            self.latencies.append(time.perf_counter() - admitted)
        finally:
            self._free.release()

    async def _follow(self, ledger: Any, life: Life) -> None:
        while not life.stopping:
            self._version = (await ledger.state()).version
            await life.pause(0.2)


class Learner:
    """Draws batches and commits them, for a number of seconds after a few steps to warm up."""

    def __init__(self, config: Config, seconds: float) -> None:
        self._config = config
        self._seconds = seconds

    async def service(self, life: Life) -> None:
        """Open the run, draw, commit, and tell when measuring begins and ends."""
        async with AsyncExitStack() as stack:
            site = await open_site(self._config, "learner", "learner", LearnerMetrics(), life, stack)
            sender = await site.sender(to="buffer")
            await site.ledger.open_run(self._terms())
            await site.ledger.claim_learner(site.incarnation)
            await site.join()
            parts: Any = SimpleNamespace(
                config=self._config,
                ledger=site.ledger,
                learner=site.incarnation,
                prompts=Prompts(),
                sender=sender,
                contract=contract_of(self._config, self._terms()),
                poison=None,
                metrics=LearnerMetrics(),
            )
            await self._steps(Draw(parts), site.ledger, site.incarnation)

    async def _steps(self, draw: Draw, ledger: Any, learner: str) -> None:
        step, begun, end = 0, 0.0, float("inf")
        while (now := time.perf_counter()) < end:
            if step == WARM_STEPS and not begun:
                begun, end = now, now + self._seconds
                say(event="begin")
            batch = await draw.batch(Line(step, step, ()))
            if not isinstance(batch, list):
                continue
            step += 1
            await ledger.commit(step, step, learner, [(group.ticket, group.attempt) for group, _ in batch])
            if step % SAVE_EVERY == 0:
                await ledger.durable(step, learner)
        await draw.close()
        groups = (step - WARM_STEPS) * self._config.batch.groups
        say(event="end", groups=groups, seconds=time.perf_counter() - begun)

    def _terms(self) -> RunTerms:
        return RunTerms(
            run_id=self._config.run.name or "",
            dataset_fingerprint="none",
            prompts=PROMPTS,
            seed=SEED,
            max_staleness=self._config.staleness.max_staleness,
            groups_per_step=self._config.batch.groups,
            max_groups=self._config.buffer.max_groups or 0,
        )


def main() -> None:
    """Run one end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("end", choices=("rollout", "learner"))
    parser.add_argument("config")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    config, _ = load_config(options.config)

    async def service(life: Life) -> None:
        end = Rollout(config, options.at_once) if options.end == "rollout" else Learner(config, options.seconds)
        await end.service(life)

    raise SystemExit(run_process(service))


if __name__ == "__main__":
    main()
