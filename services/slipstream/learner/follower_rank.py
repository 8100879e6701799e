"""Ranks other than 0: they do what rank 0 does, with the same inputs, and talk to nobody else."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.learner.ranks.common_root import see_common_root
from slipstream.learner.ranks.ranks import STOP, close_ranks, open_ranks
from slipstream.learner.step.step_wire import unpack_work
from slipstream.learner.step.trainer import Trainer
from slipstream.lifecycle.life import Life, Service
from slipstream.models.resolve import resolve

_LAST_SAVE_SECONDS = 60.0  # for one that is being written; rank 0 has waited for it before it says stop
_LOG = logging.getLogger("slipstream.learner")


def follower(config: Config) -> Service:
    """The service of a rank other than 0. It ends when rank 0 says so, also when a signal asked for it earlier."""

    async def service(life: Life) -> None:
        model = await asyncio.to_thread(resolve, config.model.source)
        ranks = await asyncio.to_thread(open_ranks, config.learner)
        await asyncio.to_thread(see_common_root, ranks, None)
        trainer = await asyncio.to_thread(Trainer, config, model, ranks)
        _LOG.info("rank %d of %d is ready", ranks.rank, ranks.size)
        work = asyncio.ensure_future(asyncio.to_thread(follow, trainer))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await work
        finally:
            close_ranks()

    return service


def follow(trainer: Trainer) -> None:
    """Repeat what rank 0 does until it says stop."""
    ranks = trainer.ranks
    while (work := ranks.called()) != STOP:
        if work == "step":
            trainer.step(*unpack_work(ranks.share(None)))
        elif work == "trial":
            trainer.trial(*unpack_work(ranks.share(None)))
        elif work == "save":
            trainer.save_writers()
        elif work == "load":
            trainer.load(Path(ranks.share(None)[0].decode()))
        elif work == "weights":
            trainer.load_weights(Path(ranks.share(None)[0].decode()))
        else:
            trainer.outlet.follow(work)
    trainer.saves.drop(_LAST_SAVE_SECONDS)
