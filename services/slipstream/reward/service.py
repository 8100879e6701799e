"""The reward service: scores groups and passes them on; a group is acknowledged once the buffer has stored it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt

from slipstream.config.schema import Config
from slipstream.contract import Contract, contract_of
from slipstream.errors import FencedError, LedgerError, MessageError, RunHalted, TransportTimeout
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.directory import Directory
from slipstream.lifecycle.life import Life, Service
from slipstream.lifecycle.site import OPEN_SECONDS, arrivals, open_site
from slipstream.prompts.fitting import reward_specs
from slipstream.protocol.buffer_shards import peer_of, shard_of
from slipstream.protocol.messages import Frames, Group, GroupArrays, encode_scored
from slipstream.reward.group_scoring import NamedRewards, Strikes, apply_scores, evaluation_result, wipe
from slipstream.rewards.base import Scored
from slipstream.rewards.scorers import Scorers
from slipstream.rewards.workers.worker_wire import Beside
from slipstream.run.folder import RunFolder
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import Pace, Troubles
from slipstream.telemetry.metrics import RewardMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Delivery, Outcome, Parcel, Reply, Sender
from slipstream.transport.origin import Origin

log = logging.getLogger("slipstream.reward")
_STORE_SECONDS = 30.0


def serve(config: Config, folder: RunFolder, name: str) -> Service:
    """The service as the process's outer edge runs it."""

    async def service(life: Life) -> None:
        async with AsyncExitStack() as stack:
            metrics = RewardMetrics()
            scorers = Scorers.load(
                reward_specs(config), workers=config.reward.workers, sandbox=config.reward.sandbox
            )
            await scorers.start()
            stack.push_async_callback(scorers.close)
            site = await open_site(config, name, "reward", metrics, life, stack)
            receiver = await site.receiver()
            sender = await site.sender(to="buffer")
            state = await site.ledger.state(wait_s=OPEN_SECONDS)
            await site.join()
            life.drains()
            contract = contract_of(config, state.terms)
            scoring = RewardService(config, contract, site.ledger, site.directory, scorers, sender, metrics)
            async for delivery in arrivals(receiver, life):
                life.watch("score", scoring.serve(delivery), endless=False)

    return service


class RewardService:
    """Scores groups. What is in hand when the process ends is simply dropped: its sender still has it."""

    def __init__(
        self,
        config: Config,
        contract: Contract,
        ledger: Ledger,
        directory: Directory,
        scorers: Scorers,
        sender: Sender,
        metrics: RewardMetrics,
    ) -> None:
        self._contract = contract
        self._shards = config.buffer.shards
        self._steps = config.run.steps or -1
        self._ledger = ledger
        self._directory = directory
        self._scorers = scorers
        self._sender = sender
        self._metrics = metrics
        self._unscored, self._refusals = Pace(lines=5, seconds=10.0), Troubles()
        self._names = NamedRewards(config.reward.functions)
        self._strikes = Strikes(config.reward.unscored_window, config.reward.max_unscored_share)

    async def serve(self, delivery: Delivery) -> None:
        """Score one group, see it stored, and answer its sender."""
        self._metrics.scoring(+1)
        try:
            await delivery.reply(await self._answer(delivery.parcel.frames, delivery.origin))
        finally:
            self._metrics.scoring(-1)

    async def _answer(self, frames: Frames, origin: Origin) -> Reply:
        if refusal := await self._directory.refusal(origin, "rollout"):
            return self._refuse(refusal.reason, refusal.status)
        try:
            group, arrays = self._contract.read(frames, scored=False)
        except MessageError as error:
            return self._refuse(f"malformed: {error}")
        if group.owner != origin.member:
            return self._refuse(f"{origin.member} sends a group of {group.owner!r}")
        await self._score(group, arrays)
        try:
            news = await self._book(group)
        except FencedError as error:
            return Reply(REFUSED, str(error))
        except LedgerError as error:
            self._refusals.warn(
                log, "ticket %d cannot be told to the ledger: %s", group.ticket, error, ticket=group.ticket
            )
            return Reply(RETRY, str(error))
        if news:  # what the ledger does not take, or has taken before, says nothing of how scoring goes
            self._count(group)
        if group.kind == "eval":
            return Reply(OK)
        return await self._store(group, encode_scored(group, frames))

    def _refuse(self, reason: str, status: Outcome = REFUSED) -> Reply:
        self._metrics.refused.inc()
        self._refusals.warn(log, "refused a message: %s", reason)
        return Reply(status, reason)

    async def _book(self, group: Group) -> bool:
        """Tell the ledger, as the group's owner; returns whether it was news."""
        number, owner = group.ticket, group.owner
        if group.kind == "eval":
            result = evaluation_result(group)
            return await self._ledger.report_eval(group.job, number, owner, group.oldest_version, result)
        facts = (group.token_count, group.unscored_samples)
        return await self._ledger.scored(number, group.attempt, owner, *facts)

    async def _score(self, group: Group, arrays: GroupArrays) -> None:
        started = time.monotonic()
        wipe(group)
        waiting = [index for index, sample in enumerate(group.samples) if not sample.unscored]
        texts = [group.samples[index].text for index in waiting]
        beside = Beside([ids.tolist() for ids in _ids(group, arrays, waiting)], self._state(group))
        scored = await self._scorers.score_group(group.prompt, texts, group.columns, beside) if texts else []
        apply_scores(group, scored)
        self._tell(group, waiting, scored)
        group.score_seconds = time.monotonic() - started
        if group.kind == "train":
            tracing.span("score", group.run, group.ticket, group.attempt, group.score_seconds)

    def _state(self, group: Group) -> dict[str, float]:
        """What TRL's functions read of a `trainer_state`; the version that sampled stands in for the step."""
        return {"global_step": group.newest_version, "epoch": group.epoch, "max_steps": self._steps}

    def _tell(self, group: Group, indexes: Sequence[int], scored: Sequence[Scored]) -> None:
        """Say why samples are unscored; a few lines in each stretch of time, the others are counted."""
        for index, score in zip(indexes, scored, strict=True):
            if not score.unscored:
                continue
            train = group.kind == "train"
            what = f"ticket {group.ticket}" if train else f"item {group.ticket} of {group.job}"
            self._unscored.warn(
                log,
                "%s sample %d is unscored (%s): %s",
                what,
                index,
                score.unscored,
                score.detail,
                ticket=group.ticket if train else None,
            )

    def _count(self, group: Group) -> None:
        self._metrics.scored(group.score_seconds)
        self._metrics.samples.inc(len(group.scored_rewards))
        for sample in group.samples:
            if sample.reward is not None:
                self._names.note(sample.components)
            else:
                self._metrics.unscored.labels(sample.unscored).inc()
            if cause := self._strikes.note(group.owner, sample.unscored):
                raise RunHalted(cause)

    def _shard(self, group: Group) -> str | None:
        """The buffer process that holds the ticket's shard; any will do when there is one.

        Raises:
            TransportTimeout: It is not there; the rollout keeps the group.
        """
        if self._shards == 1:
            return None
        index = shard_of(group.ticket, self._shards)
        name = peer_of(index, self._shards, self._sender.stats().peers)
        if name is None:
            raise TransportTimeout(f"buffer shard {index} of {self._shards} is not there")
        return name

    async def _store(self, group: Group, frames: Frames) -> Reply:
        parcel = Parcel(f"t{group.ticket}.{group.attempt}", "group", frames)
        try:
            return await self._sender.deliver(parcel, _STORE_SECONDS, self._shard(group))
        except TransportTimeout as error:
            self._refusals.warn(log, "group %s is not stored yet: %s", parcel.id, error, ticket=group.ticket)
            return Reply(RETRY, str(error))


def _ids(group: Group, arrays: GroupArrays, wanted: Sequence[int]) -> list[npt.NDArray[np.int32]]:
    """Token ids of some samples of a group."""
    ends = np.cumsum([sample.tokens for sample in group.samples])
    return [arrays.token_ids[ends[index] - group.samples[index].tokens : ends[index]] for index in wanted]
