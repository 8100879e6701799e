"""Who may send a buffer what: groups come from reward, and questions from the learner."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slipstream.buffer.service import answer
from slipstream.lifecycle.directory import Directory
from slipstream.transport.base import OK, REFUSED, RETRY, Parcel
from slipstream.transport.origin import Origin

REWARD, LEARNER, ROLLOUT = Origin("reward-0", "r"), Origin("learner", "l"), Origin("rollout-0", "g")


class Members:
    """A ledger that knows one live member of each role."""

    async def members(self):
        roles = {REWARD: "reward", LEARNER: "learner", ROLLOUT: "rollout"}
        return [SimpleNamespace(id=o.member, incarnation=o.incarnation, role=role) for o, role in roles.items()]


class Delivered:
    """A parcel in the hands of the service."""

    def __init__(self, kind, frames, origin) -> None:
        self.parcel, self.origin = Parcel("id", kind, frames), origin

    async def reply(self, reply) -> None:
        self.answer = reply


@pytest.fixture
async def tell(make_intake, make_offers, ledger):
    offers = make_offers()
    intake = make_intake(offers)
    writer = asyncio.create_task(intake.run())
    directory = Directory(Members())

    async def make(kind, frames, origin):
        delivery = Delivered(kind, frames, origin)
        await answer(delivery, intake, offers, directory)
        return delivery.answer

    yield make
    writer.cancel()


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (REWARD, OK),
        (ROLLOUT, REFUSED),
        (LEARNER, REFUSED),
        (Origin("reward-0", "forged"), RETRY),
        (Origin(), RETRY),
    ],
)
async def test_a_buffer_takes_groups_from_reward_only(
    tell, make_group, ledger, store, metrics, caplog, origin, status
):
    """A generator that sent its groups past reward set its own rewards."""
    ledger.fly(1)
    reply = await tell("group", make_group(1)[1], origin)
    assert reply.status == status
    assert ledger.states_of[1] == ("buffered" if status == OK else "scored")
    assert len(store) == (status == OK)
    assert metrics.received.labels("turned_away")._value.get() == (status != OK)


@pytest.mark.parametrize(
    ("origin", "status"), [(LEARNER, OK), (REWARD, REFUSED), (Origin("learner", "x"), RETRY), (Origin(), RETRY)]
)
async def test_a_buffer_answers_the_learner_only(tell, ask, fetch, origin, status):
    assert (await tell("offer", ask(), origin)).status == status
    assert (await tell("fetch", fetch(1), origin)).status == status
