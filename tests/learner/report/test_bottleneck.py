"""What limits a run, worked out by hand for made-up members."""

from __future__ import annotations

import pytest

from slipstream.learner.report.bottleneck import BottleneckMeter
from slipstream.ledger.records import MemberInfo


def member(role: str, name: str = "", incarnation: str = "i", **detail: float) -> MemberInfo:
    return MemberInfo(
        id=name or role,
        role=role,
        endpoint="",
        metrics_port=0,
        host="",
        pid=0,
        incarnation=incarnation,
        version=0,
        detail=detail,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(before: list[MemberInfo], after: list[MemberInfo], parts: dict[str, float], ended: bool = False):
    """Two looks ten seconds apart, with five steps between them."""
    clock = Clock()
    pipeline = BottleneckMeter(clock=clock)
    pipeline.look(before, ended)
    for _ in range(5):
        pipeline.step(parts)
    clock.now = 10.0
    pipeline.look(after, ended)
    return pipeline.verdict()


def test_generators_that_are_always_full_are_the_limit():
    verdict = run(
        [member("rollout", up=0, busy=0, slots=8, swap=0), member("reward", up=0, busy=0, slots=1)],
        [member("rollout", up=10, busy=76, slots=8, swap=0.5), member("reward", up=10, busy=2, slots=1)],
        {"wait": 1.2, "forward": 0.5, "publish": 0.1},
    )
    assert verdict.load == pytest.approx(
        {"generate": 0.95, "reward": 0.2, "data": 0.0, "train": (10 - 6 - 0.5) / 10, "sync": 0.1}
    )
    assert verdict.seconds["generate"] == pytest.approx(1.9)  # of a step of two seconds
    assert verdict.limit_ratio == pytest.approx(0.95)
    assert verdict.bottleneck == "generate"


def test_two_replicas_count_by_their_slots_and_the_slowest_swap_counts():
    verdict = run(
        [
            member("rollout", "a", up=0, busy=0, slots=8, swap=0),
            member("rollout", "b", up=0, busy=0, slots=24, swap=0),
        ],
        [
            member("rollout", "a", up=10, busy=80, slots=8, swap=3),
            member("rollout", "b", up=10, busy=0, slots=24, swap=1),
        ],
        {"wait": 0.0},
    )
    assert verdict.load["generate"] == pytest.approx(0.25)
    assert verdict.load["sync"] == pytest.approx(0.3)
    assert verdict.bottleneck == "train"
    assert verdict.as_record()["replicas"] == 2


def test_free_slots_after_the_end_of_the_data_are_the_data_s():
    idle = [member("rollout", up=0, busy=0, slots=8)], [member("rollout", up=10, busy=8, slots=8)]
    assert run(*idle, {"wait": 2.0}).load["data"] == 0.0
    verdict = run(*idle, {"wait": 2.0}, ended=True)
    assert verdict.load["data"] == pytest.approx(0.9)
    assert verdict.bottleneck == "data"


def test_a_replica_that_was_started_anew_is_left_out():
    """Its counts began again; a difference of two lives would be nonsense."""
    verdict = run(
        [member("rollout", incarnation="old", up=100, busy=700, slots=8)],
        [member("rollout", incarnation="new", up=1, busy=2, slots=8)],
        {"wait": 1.0},
    )
    assert verdict.load["generate"] == 0.0


def test_nothing_is_said_before_there_is_something_to_compare():
    clock = Clock()
    pipeline = BottleneckMeter(clock=clock)
    assert pipeline.step({"wait": 1.0})
    pipeline.look([], False)
    assert pipeline.verdict() is None
    assert not pipeline.step({"wait": 1.0})  # no second has passed
    clock.now = 1.0
    assert pipeline.step({"wait": 1.0})
