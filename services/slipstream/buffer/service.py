"""The buffer service: stores scored groups durably, and hands the learner its batches."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from slipstream.buffer.intake import Intake
from slipstream.buffer.offers import Offers
from slipstream.buffer.showing import Dropped
from slipstream.buffer.store import Store
from slipstream.config.schema import Config
from slipstream.contract import contract_of
from slipstream.lifecycle.life import Life, Service
from slipstream.lifecycle.site import OPEN_SECONDS, arrivals, open_site
from slipstream.run_folder import RunFolder
from slipstream.shards import index_of
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.book import BookMetrics
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.telemetry.samples import SampleLog
from slipstream.transport.base import REFUSED, Delivery, Reply

log = logging.getLogger("slipstream.buffer")


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
            intake = Intake(
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
            life.watch("book", BookMetrics(metrics).follow(site.ledger, life))
            await site.join(shard=offers.shard)
            life.drains()
            async for delivery in arrivals(receiver, life):
                life.watch("answer", _answer(delivery, intake, offers), endless=False)

    return service


async def _answer(delivery: Delivery, intake: Intake, offers: Offers) -> None:
    parcel = delivery.parcel
    if parcel.kind == "group":
        reply = await intake.store(parcel.frames)
    elif parcel.kind == "offer":
        reply = await offers.offer(parcel.frames)
    elif parcel.kind == "fetch":
        reply = await offers.fetch(parcel.frames)
    else:
        reply = Reply(REFUSED, f"a buffer knows no {parcel.kind!r}")
    await delivery.reply(reply)
