"""Rolls one ticket or evaluation item: samples it, and keeps the group until it is stored."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, replace

import numpy as np

from slipstream.config.schema import Config
from slipstream.contract import Contract
from slipstream.errors import SlipstreamError, TransportTimeout
from slipstream.ledger.records import EvalClaim, Ticket
from slipstream.prompts.sets import Prompt
from slipstream.protocol.messages import Frame, Group, encode_group
from slipstream.rollout.engines.base import Engine, GroupRequest, Sampling
from slipstream.rollout.episode import Episode, seeds_of
from slipstream.run.tokens import Tokenizer
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import Troubles
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.transport.base import RETRY, Parcel, Reply, Sender

log = logging.getLogger("slipstream.rollout")
_OFFER_SECONDS = 30.0
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """What to sample, and the header that the group will travel with.

    `deadline_seconds` is the time to sample it, and again the time to have it stored. `partial` is what another
    replica has sampled of it; `rows` of its samples are left to go on with.
    """

    id: str
    header: Group
    prompt: Prompt
    seeds: tuple[int, ...]
    temperature: float
    deadline_seconds: float
    rows: int
    partial: bytes = b""


class Unfinished(Exception):
    """A group that is not finished here: `partial` holds its `tokens`, for another replica (`to`, if named)."""

    def __init__(self, tokens: int, partial: bytes, to: str = "") -> None:
        super().__init__(f"handed over with {tokens} tokens")
        self.tokens, self.partial, self.to = tokens, partial, to


class Roller:
    """Samples orders on the engine and delivers the groups to reward."""

    def __init__(
        self,
        config: Config,
        contract: Contract,
        engine: Engine,
        sender: Sender,
        tokenizer: Tokenizer,
        metrics: RolloutMetrics,
    ) -> None:
        self._config = config
        self._contract = contract
        self._engine = engine
        self._sender = sender
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._troubles = Troubles()
        self._engaged: dict[str, int] = {}
        self._offers: dict[str, asyncio.Timeout] = {}
        self._moving: dict[str, str] = {}
        self._sampling: dict[str, Order] = {}
        self._leaving = False
        self._show()

    @property
    def free_slots(self) -> int:
        """Sequences that may still be ordered; what is ordered counts at once, not when the engine sees it."""
        return self._config.rollout.engine.max_sequences - self.rows

    @property
    def rows(self) -> int:
        """Sequences that are ordered."""
        return sum(self._engaged.values())

    @property
    def sampling(self) -> list[Order]:
        """Orders of training groups that the engine works on."""
        return list(self._sampling.values())

    def engage(self, order: Order) -> None:
        """Reserve the order's sequences until they are sampled, or `release` gives them back."""
        self._engaged[order.id] = order.rows
        self._show()

    def release(self, order: Order) -> None:
        """Give back what was reserved; harmless when it has been."""
        self._engaged.pop(order.id, None)
        self._show()

    def _show(self) -> None:
        """A replica can use whole groups' worth of its slots; what is left over is no idleness."""
        most, group = self._config.rollout.engine.max_sequences, self._config.batch.group_size
        self._metrics.engaged(self.rows, max(group, most - most % group))

    async def roll(self, order: Order) -> Reply:
        """Sample and deliver a group; returns the answer: stored, or refused with the reason.

        Raises:
            TimeoutError: The engine did not finish within the order's deadline; it was told to abort.
            TransportTimeout: Nobody stored the group within the deadline.
            MessageError: The engine gave something that is no group of this run.
            Unfinished: It was interrupted; another replica can go on with it.
        """
        episode, started = Episode(len(order.seeds), order.partial, order.header.head), time.monotonic()
        try:
            self._contract.check_ids("partial", np.asarray(episode.token_ids, np.int32))
            if episode.unfinished:
                await self._sample(order, episode)
        finally:
            self.release(order)
        seconds = time.monotonic() - started
        if self._interrupted(order) and episode.unfinished:
            self._metrics.handed_over(episode.tokens - episode.begun)
            raise Unfinished(*episode.partial(seconds), to=self._moving.pop(order.id, ""))
        self._moving.pop(order.id, None)
        order.header.generate_seconds = episode.seconds + seconds
        arrays = episode.finish(order.header, order.prompt.prompt_ids, self._tokenizer)
        lengths = [sample.tokens for sample in order.header.samples]
        self._metrics.sampled(lengths, order.header.generate_seconds, episode.begun)
        head = order.header
        if head.kind == "train":
            tracing.span("generate", head.run, head.ticket, head.attempt, seconds, tokens=head.token_count)
        frames = encode_group(order.header, arrays)
        self._contract.check(order.header, arrays, scored=False)
        try:
            async with asyncio.timeout(None) as offer:
                self._offers[order.id] = offer
                with self._metrics.undelivered.track_inprogress():
                    return await self._deliver(order, frames)
        except TimeoutError:
            raise Unfinished(*episode.partial(seconds)) from None
        finally:
            self._offers.pop(order.id, None)

    async def drain(self, seconds: float) -> None:
        """End what is being sampled: as a whole if it ends within `seconds`, else to be handed over."""
        self._leaving = True
        await self._engine.drain(seconds)

    def give_up(self) -> None:
        """Offer nothing any longer: what is not stored yet is to be handed over."""
        for offer in self._offers.values():
            offer.reschedule(asyncio.get_running_loop().time())

    async def interrupt(self, order: Order, to: str) -> None:
        """End one group that is being sampled, to be handed over to a named replica."""
        self._moving[order.id] = to
        await self._engine.abort(order.id)

    def _interrupted(self, order: Order) -> bool:
        return self._leaving or order.id in self._moving

    async def _sample(self, order: Order, episode: Episode) -> None:
        sampling = Sampling(
            order.temperature,
            order.prompt.max_new_tokens,
            self._tokenizer.stop_ids,
            tuple(self._config.sampling.stop_strings),
            order.header.head,
        )
        samples = episode.unfinished
        seeds = tuple(order.seeds[sample] for sample in samples)
        prefixes = tuple(episode.prefix(sample) for sample in samples) if episode.begun else ()
        request = GroupRequest(order.id, order.prompt.prompt_ids, seeds, sampling, prefixes)
        if order.header.kind == "train":
            self._sampling[order.id] = order
        try:
            async with asyncio.timeout(order.deadline_seconds):
                async for chunk in self._engine.generate(request):
                    episode.add(replace(chunk, sample=samples[chunk.sample]), self._interrupted(order))
        except TimeoutError:
            raise TimeoutError(f"not sampled within {order.deadline_seconds:.0f} s") from None
        except SlipstreamError:
            if not self._leaving:  # else it has refused what came while it drains
                raise
        finally:
            self._sampling.pop(order.id, None)
            await self._engine.abort(order.id)  # harmless when it has ended

    async def _deliver(self, order: Order, frames: list[Frame]) -> Reply:
        """Offer the group until it is stored or refused; after the deadline the ledger gives it to another."""
        parcel = Parcel(order.id, "group", frames)
        end = time.monotonic() + order.deadline_seconds
        while (left := end - time.monotonic()) > 0:
            try:
                reply = await self._sender.deliver(parcel, min(left, _OFFER_SECONDS))
            except TransportTimeout as error:
                ticket = order.header.ticket if order.header.kind == "train" else None
                self._troubles.warn(log, "group %s is still here: %s", order.id, error, ticket=ticket)
                continue
            if reply.status != RETRY:
                return reply
            await asyncio.sleep(min(left, _RETRY_SECONDS))
        raise TransportTimeout(f"group {order.id} was not stored within {order.deadline_seconds:.0f} s")


def ticket_order(
    ticket: Ticket, epoch: int, prompt: Prompt, config: Config, owner: str, seconds: float
) -> Order:
    """The order of a training ticket, with the seconds that the ledger leaves it.

    A sample's seed depends on (run, ticket, sample) alone, and engines draw by the token's place, so a sample that
    goes on elsewhere draws what it would have drawn.

    Raises:
        MessageError: What was handed over cannot be read.
    """
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
        head=config.sampling.top_logprobs,
    )
    size = config.batch.group_size
    return Order(
        id=f"t{ticket.number}.{ticket.attempt}",
        header=header,
        prompt=prompt,
        seeds=seeds_of(config.run.seed, ticket.number, size),
        temperature=config.sampling.temperature,
        deadline_seconds=seconds,
        rows=len(Episode(size, ticket.partial, config.sampling.top_logprobs).unfinished),
        partial=ticket.partial,
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
        # a job may be opened again under its name, and must not get an answer that is remembered from before
        id=f"e{claim.job}.{item}.{os.urandom(6).hex()}",
        header=header,
        prompt=prompt,
        seeds=seeds_of(config.run.seed, item, 1),
        temperature=config.evaluation.temperature,
        deadline_seconds=config.rollout.ticket_seconds,
        rows=1,
    )
