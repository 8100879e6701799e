from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slipstream.errors import BaseMismatch, RunHalted, TransportTimeout, UserError, WeightsError
from slipstream.lifecycle.life import Life
from slipstream.rollout import follower as follower_module
from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.first_weights import FirstWeights
from slipstream.rollout.follower import WeightsFollower
from slipstream.weights.manifest import Canary


class Weights:
    def __init__(self, version: int) -> None:
        self.version, self.released = version, 0
        canary = [Canary([1, 2], [3, 4], [-0.5, -1.5])]
        self.manifest = SimpleNamespace(
            version=version, canary=canary, digest=f"d{version}", layout=SimpleNamespace(total_bytes=8)
        )

    def release(self) -> None:
        self.released += 1


class FakeLedger:
    """Announces one version after the other; ends the life after the last."""

    def __init__(self, life: Life, versions: list[int]) -> None:
        self._life, self._versions = life, versions
        self.status = "running"
        self.learners = [SimpleNamespace(version=1)]

    async def members(self, role):
        assert role == "learner"
        return self.learners

    async def state(self):
        return SimpleNamespace(status=self.status)

    async def manifest(self, newer_than=-1):
        if not self._versions:
            self._life.closing()
            return None
        version = self._versions.pop(0)
        return (version, str(version).encode()) if version > newer_than else None


class FakeSubscriber:
    def __init__(self) -> None:
        self.fetched: list[Weights] = []
        self.errors: list[Exception] = []
        self.closed, self.forgotten, self.relay = False, 0, "stream://here"

    def forget(self) -> None:
        self.forgotten += 1

    def fetch(self, manifest: int) -> Weights:
        if self.errors:
            raise self.errors.pop(0)
        self.fetched.append(Weights(manifest))
        return self.fetched[-1]

    def close(self) -> None:
        self.closed = True


def test_a_look_at_the_manifest_is_rarer_the_longer_no_version_came(monkeypatch):
    monkeypatch.setattr(follower_module, "POLL_SECONDS", 0.05)
    looks = [follower_module._patience(quiet) for quiet in (0.0, 1.0, 5.0, 20.0, 1e6)]
    assert looks == pytest.approx([0.05, 0.05, 0.1, 0.4, 0.5])


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(follower_module, "decode_manifest", int)
    monkeypatch.setattr(follower_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(follower_module, "RETRY_SECONDS", 0.0)


def follow(engine, versions, **options):
    life, subscriber = Life(), FakeSubscriber()
    follower = WeightsFollower(FakeLedger(life, list(versions)), subscriber, engine, **options)
    return follower, subscriber, life


@pytest.mark.parametrize(("status", "said"), [("running", 1), ("finished", 0)])
async def test_weights_that_went_away_with_a_finished_learner_are_not_waited_for(
    make_engine, caplog, status, said
):
    caplog.set_level("INFO", logger="slipstream.rollout")
    follower, subscriber, life = follow(make_engine(), [1, 1])
    follower._ledger.status = status
    subscriber.errors = [WeightsError("version 1 is gone"), WeightsError("version 1 is gone")]
    await follower.follow(life)
    assert [r.getMessage() for r in caplog.records].count(
        "waiting for usable weights, serving version 0: version 1 is gone"
    ) == said


async def test_a_newer_version_replaces_one_that_waits(make_engine):
    engine = make_engine()
    follower, subscriber, life = follow(engine, [1, 1, 2])
    await follower.follow(life)
    assert [(weights.version, weights.released) for weights in subscriber.fetched] == [(1, 1), (2, 0)]
    assert await follower.swap_if_newer()
    assert engine.version == 2
    assert not await follower.swap_if_newer()


async def test_the_label_moves_only_with_the_swap(make_engine):
    """Case 67."""
    engine = make_engine()
    follower, _, life = follow(engine, [1])
    await follower.follow(life)
    assert engine.version == 0


@pytest.mark.parametrize(
    "error", [WeightsError("torn"), TransportTimeout("publisher gone"), UserError("/dev/shm is full")]
)
async def test_weights_that_cannot_be_had_are_asked_for_again(make_engine, error):
    """Cases 72 and 74: the version served stays, whatever happens to a newer one."""
    engine = make_engine()
    follower, subscriber, life = follow(engine, [1, 1])
    subscriber.errors = [error]
    await follower.follow(life)
    assert engine.version == 0
    assert await follower.swap_if_newer()
    assert engine.version == 1


async def test_a_version_that_is_served_already_is_not_fetched(make_engine):
    engine = make_engine()
    engine.version = 5
    follower, subscriber, life = follow(engine, [4, 5])
    await follower.follow(life)
    assert subscriber.fetched == []


async def test_a_version_that_is_being_swapped_in_is_not_fetched_again(make_engine):
    """It is staged no more and served not yet; a second copy would be refused by the link, which only grows."""
    engine, begun, go_on = make_engine(), asyncio.Event(), asyncio.Event()
    swap = engine.swap

    async def slowly(weights):
        begun.set()
        await go_on.wait()
        await swap(weights)

    engine.swap = slowly
    follower, subscriber, life = follow(engine, [7])
    await follower.follow(life)
    swapping = asyncio.create_task(follower.swap_if_newer())
    await begun.wait()
    assert follower._newest() == 7
    go_on.set()
    await swapping
    assert (follower._newest(), engine.version, len(subscriber.fetched)) == (7, 7, 1)


async def test_closing_releases_what_waits(make_engine):
    follower, subscriber, life = follow(make_engine(), [1])
    await follower.follow(life)
    follower.close()
    assert subscriber.fetched[0].released == 1
    assert subscriber.closed


async def test_a_fetch_that_ends_after_closing_is_released(make_engine):
    follower, subscriber, life = follow(make_engine(), [1])
    gate, begun, fetch = threading.Event(), asyncio.Event(), subscriber.fetch
    loop = asyncio.get_running_loop()

    def slow(manifest):
        loop.call_soon_threadsafe(begun.set)
        gate.wait(20)
        return fetch(manifest)

    subscriber.fetch = slow
    following = asyncio.create_task(follower.follow(life))
    await begun.wait()
    follower.close()
    gate.set()
    await following
    assert subscriber.fetched[0].released == 1


async def test_a_late_replica_learns_the_version_by_asking(make_engine):
    """Case 90: it joined after version 7 was published and heard of none."""
    engine = make_engine()
    follower, _, life = follow(engine, [7])
    await follower.follow(life)
    assert await follower.swap_if_newer()
    assert engine.version == 7


class Says:
    """An engine's answers to a canary, one after the other; remembers what it was asked."""

    def __init__(self, engine, answers):
        self.asked, self._answers = [], list(answers)
        engine.generate = self.generate

    async def generate(self, request):
        self.asked.append(request)
        token, logprob = self._answers.pop(0)
        yield Chunk(0, (token,), (logprob,), 1, "length")


async def test_an_engine_that_says_what_the_learner_says_is_trusted(make_engine):
    engine = make_engine()
    follower, _, life = follow(engine, [1], host="here", canary_bound=0.1)
    await follower.follow(life)
    says = Says(engine, [(4, -1.45)])
    await follower.swap_if_newer()
    assert await follower.trusted()
    assert (says.asked[0].prompt_ids, says.asked[0].sampling.temperature) == ((1, 2), 0.0)
    noted = follower.note()
    assert noted.pop("deviation") == pytest.approx(0.05)
    assert noted == {"host": "here", "relay": "stream://here", "fingerprint": "d1"}


@pytest.mark.parametrize("wrong", [(4, -1.7), (9, -0.5)])
async def test_an_engine_that_says_something_else_gets_its_weights_anew(make_engine, wrong):
    """A logprob off, or a token that the learner finds unlikely: then the same version, from its source."""
    engine = make_engine()
    follower, subscriber, _ = follow(engine, [1, 1], canary_bound=0.1)
    Says(engine, [wrong, (3, -0.5)])
    await follower._stage(b"1")
    await follower.swap_if_newer()
    assert not await follower.trusted()
    await follower.serve_anew()
    assert (subscriber.forgotten, engine.version) == (1, 1)
    assert await WeightsFollower(None, subscriber, engine).trusted()  # without a bound nothing is asked


async def test_an_engine_that_stays_different_ends_its_process_with_the_reason(make_engine):
    engine = make_engine()
    follower, *_ = follow(engine, [1, 1], canary_bound=0.1)
    Says(engine, [(9, -0.5), (9, -0.5)])
    await follower._stage(b"1")
    await follower.swap_if_newer()
    assert not await follower.trusted()
    with pytest.raises(WeightsError, match="weights_mismatch: version 1, pulled anew, still differs"):
        await follower.serve_anew()


async def test_a_base_of_other_weights_ends_the_replica():
    """Nothing that it could wait for would mend it."""
    follower, subscriber, life = follow(SimpleNamespace(version=None), [1, 2])
    subscriber.errors = [BaseMismatch("model.source: other weights", "give every role the same model")]
    with pytest.raises(BaseMismatch):
        await follower.follow(life)


async def test_a_version_that_the_engine_has_lost_for_a_while_is_not_fetched_again(make_engine):
    """Such as over a new start: it holds the weights, and a link gives out a version only once."""
    engine = make_engine()
    follower, _, life = follow(engine, [7])
    await follower.follow(life)
    assert await follower.swap_if_newer() == 7
    engine.version = None
    assert follower._newest() == 7


class Starving:
    """A replica without weights, for which every fetch takes ten seconds and fails."""

    def __init__(self, versions=(1,) * 20, engine=None):
        self.now = 0.0
        self.engine = engine or SimpleNamespace(version=None)
        self.follower, self.subscriber, self.life = follow(self.engine, versions, frame_seconds=10.0)
        self.ledger = self.follower._ledger
        self.follower._first = FirstWeights(self.ledger, 10.0, lambda: self.now)
        self.subscriber.fetch = self.fetch
        self.tries = 0

    def fetch(self, manifest):
        self.tries += 1
        self.now += 10.0
        raise TransportTimeout("weights from tcp://learner:1: no frame of version 1 within 10 s")


async def test_a_replica_that_never_had_weights_ends_the_run_with_the_reason():
    starving = Starving()
    with pytest.raises(
        RunHalted,
        match=r"no weights at all in 4 tries and 30 s \(3 x weights.frame_seconds\).*no frame of version 1",
    ):
        await starving.follower.follow(starving.life)
    assert starving.tries == 4  # the time counts from the first that failed


async def test_a_replica_that_has_weights_asks_for_newer_ones_for_ever(make_engine):
    starving = Starving(engine=make_engine())
    await starving.follower.follow(starving.life)
    assert starving.tries == 20


@pytest.mark.parametrize("learners", [[], [SimpleNamespace(version=-1)]], ids=["gone", "starting again"])
async def test_a_replica_without_weights_waits_for_a_learner_that_offers_none(learners):
    starving = Starving()
    starving.ledger.learners = learners
    await starving.follower.follow(starving.life)
    assert starving.tries == 20


async def test_short_failures_are_tried_for_the_whole_time():
    """Such as a version that is gone: its successor may come."""
    starving = Starving(versions=(1,) * 40)

    def fetch(manifest):
        starving.tries += 1
        starving.now += 1.0
        raise WeightsError("version 1 is gone")

    starving.subscriber.fetch = fetch
    with pytest.raises(RunHalted, match=r"31 tries and 30 s.*last: version 1 is gone"):
        await starving.follower.follow(starving.life)
