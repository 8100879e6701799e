"""Rolls one ticket or evaluation item: samples it, and keeps the group until it is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from slipstream.config.schema import Config
from slipstream.errors import TransportTimeout
from slipstream.ledger.records import EvalClaim, Ticket
from slipstream.messages import Frame, Group, encode_group
from slipstream.prompts.sets import Prompt
from slipstream.rollout.engines.base import Engine, GroupRequest, Sampling
from slipstream.rollout.episode import Episode, seeds_of
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.tokens import Tokenizer
from slipstream.transport.base import OK, Parcel, Sender

log = logging.getLogger("slipstream.rollout")
_DELIVER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """What to sample, and the header that the group will travel with."""

    id: str
    header: Group
    prompt: Prompt
    seeds: tuple[int, ...]
    temperature: float
    deadline_seconds: float


class Roller:
    """Samples orders on the engine and delivers the groups to reward."""

    def __init__(
        self, config: Config, engine: Engine, sender: Sender, tokenizer: Tokenizer, metrics: RolloutMetrics
    ) -> None:
        self._config = config
        self._engine = engine
        self._sender = sender
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._engaged = 0

    @property
    def free_slots(self) -> int:
        """Sequences that may still be ordered; what is ordered counts at once, not when the engine sees it."""
        return self._config.rollout.engine.max_sequences - self._engaged

    def engage(self, order: Order) -> None:
        """Reserve the order's sequences; `roll` gives them back once they are sampled."""
        self._engaged += len(order.seeds)

    async def roll(self, order: Order) -> str:
        """Sample, deliver, and return what became of the group: `stored` or why it was refused.

        Raises:
            TimeoutError: The engine did not finish within the order's deadline; it was told to abort.
            MessageError: The engine gave something that is no valid group.
        """
        try:
            frames = await self._sample(order)
        finally:
            self._engaged -= len(order.seeds)
        with self._metrics.undelivered.track_inprogress():
            return await self._deliver(order, frames)

    async def _sample(self, order: Order) -> list[Frame]:
        started = time.monotonic()
        episode = Episode(len(order.seeds))
        sampling = Sampling(order.temperature, order.prompt.max_new_tokens, self._tokenizer.stop_ids)
        request = GroupRequest(order.id, order.prompt.prompt_ids, order.seeds, sampling)
        try:
            async with asyncio.timeout(order.deadline_seconds):
                async for chunk in self._engine.generate(request):
                    episode.add(chunk)
        except BaseException:
            await self._engine.abort(order.id)
            raise
        order.header.generate_seconds = time.monotonic() - started
        arrays = episode.finish(order.header, order.prompt.prompt_ids, self._tokenizer)
        self._metrics.tokens.inc(order.header.token_count)
        return encode_group(order.header, arrays)

    async def _deliver(self, order: Order, frames: list[Frame]) -> str:
        """Keep offering the group: until it is stored, only the ledger may take it away from us."""
        while True:
            try:
                reply = await self._sender.deliver(Parcel(order.id, "group", frames), _DELIVER_SECONDS)
            except TransportTimeout as error:
                log.warning("group %s is still here: %s", order.id, error)
                continue
            return "stored" if reply.status == OK else reply.reason


def ticket_order(ticket: Ticket, epoch: int, prompt: Prompt, config: Config, owner: str) -> Order:
    """The order of a training ticket."""
    header = Group(
        run=config.run.name or "",
        ticket=ticket.number,
        attempt=ticket.attempt,
        epoch=epoch,
        prompt_index=prompt.index,
        owner=owner,
        admitted_version=ticket.admitted_version,
        samples=[],
        prompt=prompt.text,
        columns=prompt.columns,
    )
    return Order(
        id=f"t{ticket.number}.{ticket.attempt}",
        header=header,
        prompt=prompt,
        seeds=seeds_of(config.run.seed, ticket.number, config.batch.group_size),
        temperature=config.sampling.temperature,
        deadline_seconds=config.rollout.ticket_seconds,
    )


def evaluation_order(claim: EvalClaim, item: int, prompt: Prompt, config: Config, owner: str) -> Order:
    """The order of one evaluation item: a single sample, greedy unless configured otherwise."""
    header = Group(
        run=config.run.name or "",
        kind="eval",
        job=claim.job,
        ticket=item,
        attempt=0,
        prompt_index=item,
        owner=owner,
        admitted_version=claim.version,
        samples=[],
        prompt=prompt.text,
        columns=prompt.columns,
    )
    return Order(
        id=f"e{claim.job}.{claim.version}.{item}.{owner}",
        header=header,
        prompt=prompt,
        seeds=seeds_of(config.run.seed, item, 1),
        temperature=config.evaluation.temperature,
        deadline_seconds=config.rollout.ticket_seconds,
    )
