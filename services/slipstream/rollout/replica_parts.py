"""Opens everything a rollout replica needs, in the order in which mistakes are cheapest to report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.contract import contract_of
from slipstream.errors import UserError
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.site import OPEN_SECONDS, Site, open_site
from slipstream.models.resolve import resolve
from slipstream.prompts.build import build_prompts, context_length
from slipstream.prompts.sets import PromptSet
from slipstream.rollout.engines.base import Engine
from slipstream.rollout.engines.factory import make_engine
from slipstream.rollout.follower import WeightsFollower
from slipstream.rollout.roller import Roller
from slipstream.run.tokens import load_tokenizer
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.transport.zeromq.keys import keys_of
from slipstream.weights.transports import host_name, open_subscriber

log = logging.getLogger("slipstream.rollout")
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class ReplicaParts:
    """What a replica works with; all of it is closed with the exit stack."""

    config: Config
    name: str
    site: Site
    ledger: Ledger
    engine: Engine
    follower: WeightsFollower
    roller: Roller
    prompts: PromptSet
    evaluations: Mapping[str, PromptSet]
    metrics: RolloutMetrics


async def open_parts(config: Config, name: str, life: Life, stack: AsyncExitStack) -> ReplicaParts:
    """Load prompts and engine, and connect; the service itself joins the run.

    Raises:
        UserError: The prompts are not those of the run, or something named in the config cannot be had.
    """
    metrics = RolloutMetrics()
    metrics.gpus.set(_gpus(config))
    site = await open_site(config, name, "rollout", metrics, life, stack)
    folder = await asyncio.to_thread(resolve, config.model.source)
    tokenizer = await asyncio.to_thread(load_tokenizer, str(folder))
    prompts, evaluations = await asyncio.to_thread(build_prompts, config, tokenizer, folder)
    engine = make_engine(config, folder, _context(config, folder, [prompts, *evaluations.values()]))
    await engine.start()
    stack.push_async_callback(engine.close)
    run = await site.ledger.state(wait_s=OPEN_SECONDS)
    if 0 < run.terms.source_rows < prompts.source_rows:  # rows were added since the run began
        rows = run.terms.source_rows
        prompts, evaluations = await asyncio.to_thread(build_prompts, config, tokenizer, folder, rows)
    if run.terms.dataset_fingerprint != prompts.fingerprint:
        await _until_these_are_the_run_s(site.ledger, prompts.fingerprint)
    subscriber = open_subscriber(config.weights, address=config.network.host, keys=keys_of(config.network.keys))
    # what the simulated engine says has nothing to do with weights
    simulated = config.rollout.engine.kind == "simulated"
    bound = None if simulated else config.weights.canary_bound
    if not simulated:
        from slipstream.weights.merging import MergingSubscriber

        subscriber = MergingSubscriber(subscriber, folder)
    follower = WeightsFollower(
        site.ledger,
        subscriber,
        engine,
        metrics,
        host_name(config.weights),
        bound,
        config.weights.frame_seconds,
    )
    stack.callback(follower.close)
    if engine.follows:
        life.watch("weights", follower.follow(life))
    sender = await site.sender(to="reward")
    roller = Roller(config, contract_of(config, run.terms), engine, sender, tokenizer, metrics)
    return ReplicaParts(
        config, name, site, site.ledger, engine, follower, roller, prompts, evaluations, metrics
    )


async def _until_these_are_the_run_s(ledger: Ledger, fingerprint: str) -> None:
    """Wait a moment: a learner that takes the run up again compares the rows too, and names the one that differs.

    Raises:
        UserError: The prompts are not those of the run.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while (await ledger.state()).terms.dataset_fingerprint != fingerprint:
        if time.monotonic() > end:
            raise UserError(
                "data: these prompts are not those of the run", "give every role the same data and model"
            )
        await asyncio.sleep(1.0)


def _gpus(config: Config, driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs that the engine takes: vLLM's, on a host whose driver shows any; unverified on a GPU."""
    engine = config.rollout.engine
    if engine.kind != "vllm" or not driver.is_dir():
        return 0
    return int(engine.options.get("tensor_parallel", 1)) * int(engine.options.get("data_parallel", 1))


def _context(config: Config, model: Path, sets: Iterable[PromptSet]) -> int:
    """Tokens that a sequence can take: the engine reserves its cache by them, so no more than needed."""
    longest = max(each.report.longest for each in sets)
    return min(context_length(config, model), longest + config.sampling.max_new_tokens)
