"""The buffer service: stores scored groups durably, and hands the learner its batches."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from slipstream.buffer.arrivals import Arrivals
from slipstream.buffer.comparison import Comparison
from slipstream.buffer.dropped_shown import Dropped
from slipstream.buffer.offers import Offers
from slipstream.buffer.store import Store
from slipstream.config.schema import Config
from slipstream.contract import contract_of
from slipstream.lifecycle.directory import Directory
from slipstream.lifecycle.life import Life, Service
from slipstream.lifecycle.site import OPEN_SECONDS, arrivals, open_site
from slipstream.protocol.buffer_shards import index_of
from slipstream.run.folder import RunFolder
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.book import BookMetrics
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.telemetry.sample_log import SampleLog
from slipstream.transport.base import REFUSED, Delivery, Reply

log = logging.getLogger("slipstream.buffer")
_SENDERS = {"group": "reward", "offer": "learner", "fetch": "learner"}


def serve(config: Config, folder: RunFolder, name: str) -> Service:
    """The service as the process's outer edge runs it."""

    async def service(life: Life) -> None:
        async with AsyncExitStack() as stack:
            index = index_of(name, config.buffer.shards)
            store = Store(folder.buffer(index), config.buffer.sync)
            stack.callback(store.close)
            metrics = BufferMetrics()
            site = await open_site(config, name, "buffer", metrics, life, stack)
            receiver = await site.receiver()
            state = await site.ledger.state(wait_s=OPEN_SECONDS)
            contract = contract_of(config, state.terms)
            dropped = Dropped(SampleLog(folder.dropped, config.telemetry.samples_mb))
            poison = AsideLog(SampleLog(folder.poison(name), config.telemetry.samples_mb))
            offers = Offers(config, contract, site.ledger, store, index, metrics, poison, dropped.show)
            await offers.catch_up()
            intake = Arrivals(
                config,
                contract,
                site.ledger,
                store,
                offers.shard,
                offers.quota,
                offers.shelve,
                offers.doubt,
                metrics,
                dropped.show,
            )
            life.watch("intake", intake.run())
            life.watch("housekeeping", offers.keep_house(life))
            comparison = Comparison(site.ledger, store, intake, offers, config.buffer.shards, metrics)
            life.watch("comparison", comparison.run(life))
            life.watch("book", BookMetrics(metrics).follow(site.ledger, life))
            await site.join(shard=offers.shard)
            life.drains()
            async for delivery in arrivals(receiver, life):
                life.watch("answer", answer(delivery, intake, offers, site.directory), endless=False)

    return service


async def answer(delivery: Delivery, intake: Arrivals, offers: Offers, directory: Directory) -> None:
    """Answer one parcel: groups come from reward, and questions from the learner."""
    await delivery.reply(await _reply(delivery, intake, offers, directory))


async def _reply(delivery: Delivery, intake: Arrivals, offers: Offers, directory: Directory) -> Reply:
    parcel, origin = delivery.parcel, delivery.origin
    sender = _SENDERS.get(parcel.kind)
    if sender is None:
        return Reply(REFUSED, f"a buffer knows no {parcel.kind!r}")
    if refusal := await directory.refusal(origin, sender):
        return intake.turned_away(parcel.kind, refusal)
    if parcel.kind == "group":
        return await intake.store(parcel.frames)
    if parcel.kind == "offer":
        return await offers.offer(parcel.frames, origin.incarnation)
    return await offers.fetch(parcel.frames, origin.incarnation)
