"""A reward is the finite number returned for that sample: what else comes back is unscored, with the reason."""

import array
import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import Outcome, RewardSpec, fault_of
from slipstream.rewards.outcomes import batch_outcomes, outcome_of
from slipstream.rewards.scorers import Scorer, Scorers


class Shouting(Exception):
    """An exception whose own text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "returned",
    [[1, 0], (1.0, 0.0), np.array([1.0, 0.0]), np.array([True, False]), array.array("d", [1, 0])],
)
def test_an_ordered_sequence_gives_each_completion_its_own_reward(returned: Any) -> None:
    assert batch_outcomes(returned, 2) == [Outcome(value=1.0), Outcome(value=0.0)]


def test_a_tensor_of_one_dimension_gives_each_completion_its_own_reward() -> None:
    torch = pytest.importorskip("torch")
    assert [o.value for o in batch_outcomes(torch.tensor([1.0, 0.5]), 2)] == [1.0, 0.5]
    assert batch_outcomes(torch.ones(2, 1), 2)[0].status == "exception"


@pytest.mark.parametrize(
    "returned",
    [
        {1.0, 0.0},
        {0: 1.0, 1: 0.0},
        {"a": 1.0, "b": 0.0}.values(),
        collections.Counter("ab"),
        b"\x01\x00",
        memoryview(b"\x01\x00"),
        "10",
        (value for value in (1.0, 0.0)),
        range(2),
        np.ones((2, 1)),
        np.ones((2, 2)),
        1.0,
        None,
    ],
)
def test_what_has_no_order_or_another_shape_is_unscored_for_every_completion(returned: Any) -> None:
    """A set, a dict, bytes or text of the right length used to score every sample with somebody else's number."""
    outcomes = batch_outcomes(returned, 2)
    assert [outcome.status for outcome in outcomes] == ["exception", "exception"]
    assert type(returned).__name__ in outcomes[0].detail


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        (Outcome(value=math.nan), "nonfinite"),
        (Outcome(value=math.inf), "nonfinite"),
        (Outcome(value=1.0, components={"a": math.nan}), "nonfinite"),
        (Outcome(value=1.0, components={"a": -math.inf}), "nonfinite"),
        (Outcome(value="1.0"), "exception"),  # type: ignore[arg-type]
        (Outcome(value=1.0, status="fine"), "exception"),  # type: ignore[arg-type]
        (Outcome(), "not_applicable"),
        (1e308, "out_of_range"),
        (-1000001, "out_of_range"),
        (10**400, "out_of_range"),
        ({"a": 1e6, "b": 1.0}, "out_of_range"),
        ({"a": 1e308, "b": -1e308}, "out_of_range"),
        ({str(number): 0.0 for number in range(65)}, "exception"),
        ({"n" * 65: 0.0}, "exception"),
        ({"": 0.0}, "exception"),
        ({1: 0.0, "1": 1.0}, "exception"),
        ({"a": {"b": 1.0}}, "exception"),
        (b"1", "exception"),
        (bytearray(b"1"), "exception"),
        (np.complex64(1 + 2j), "exception"),
        (np.complex128(0.5), "exception"),
    ],
)
def test_what_is_out_of_bounds_is_unscored_with_the_reason(returned: Any, status: str) -> None:
    outcome = outcome_of(returned, weighed=True)
    assert (outcome.value, outcome.status) == (None, status)
    assert outcome.detail or status == "not_applicable"


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1e6, 1e6),
        (-1e6, -1e6),
        ({str(number): 1.0 for number in range(64)}, 64.0),
        ({"n" * 64: 0.5}, 0.5),
        (Outcome(value=2.0, components={"a": 1.0, "b": None}), 2.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_what_is_within_bounds_is_the_number_that_was_returned(returned: Any, value: float) -> None:
    outcome = outcome_of(returned, weighed=True)
    assert (outcome.value, outcome.status) == (value, "ok")


def test_texts_are_bounded_and_any_encoder_takes_them() -> None:
    outcome = outcome_of(
        Outcome(
            value=1.0, detail="x\ud800" * 10_000, flags=("\udfff" * 1000,) * 100, components={"a\ud800": 1.0}
        )
    )
    assert len(outcome.detail) <= 500
    assert len(outcome.flags) <= 16
    assert max(len(flag) for flag in outcome.flags) <= 64
    for text in (outcome.detail, *outcome.flags, *outcome.components):
        text.encode()


def test_an_error_text_that_no_encoder_takes_costs_nothing() -> None:
    assert fault_of(ValueError("bad \ud800")).detail == "ValueError: bad \ufffd"
    assert fault_of(ValueError("y" * 10**6)).detail.startswith("ValueError: yyy")
    assert len(fault_of(ValueError("y" * 10**6)).detail) <= 500
    assert fault_of(Shouting()).detail == "Shouting: its text cannot be had (RuntimeError)"


def saying(name: str, said: Any, weight: float = 1.0) -> Scorer:
    """A reward that says one thing of every completion, or raises it."""
    from slipstream.rewards.base import Failures

    def inline(completion: str, task: Any) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    return Scorer(RewardSpec(name, weight=weight), name, Failures(), inline, None)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([("a", Outcome(value=math.nan), 1.0)], "nonfinite"),
        ([("a", Outcome(value=1e308), 1.0)], "out_of_range"),
        ([("a", Outcome(value=1e5), 1e5)], "out_of_range"),
        ([("a", Outcome(value=1e6), 1.0), ("b", Outcome(value=1e6), 1.0)], "out_of_range"),
        ([("a", Shouting(), 1.0)], "exception"),
        ([("a", RecursionError("deep"), 1.0)], "exception"),
        ([("a", "nonsense", 1.0)], "exception"),
    ],
)
async def test_a_group_is_always_scored_or_unscored_and_never_raises(rewards: Any, reason: str) -> None:
    scorers = Scorers([saying(name, said, weight) for name, said, weight in rewards])
    (scored,) = await scorers.score_group("p", ["c"], {})
    assert (scored.reward, scored.unscored) == (None, reason)
    assert scored.detail
    assert all(value is None or abs(value) <= 1e6 for value in scored.components.values())


async def test_a_reward_of_weight_0_out_of_bounds_changes_nothing() -> None:
    scorers = Scorers([saying("a", Outcome(value=1.0)), saying("b", Outcome(value=math.nan), weight=0.0)])
    (scored,) = await scorers.score_group("p", ["c"], {})
    assert (scored.reward, scored.components) == (1.0, {"a": 1.0, "b": None})


async def test_columns_that_are_no_columns_leave_the_group_unscored() -> None:
    scorers = Scorers.load([RewardSpec("last_number")])
    (scored,) = await scorers.score_group("p", ["4"], {"answer": "\ud800"})
    assert (scored.reward, scored.unscored) == (None, "exception")
    scored.detail.encode()


@pytest.mark.parametrize("spec", [RewardSpec("math", weight=1e7), RewardSpec("math", name="n" * 65)])
def test_a_weight_or_name_out_of_bounds_is_refused_at_load(spec: RewardSpec) -> None:
    with pytest.raises(UserError, match="reward"):
        Scorers.load([spec])


@pytest.mark.process
async def test_what_a_function_returns_or_raises_in_its_worker_costs_one_sample(
    scorers: Callable[..., Scorers], reward_file: Callable[[str], str]
) -> None:
    """None of these ends the worker: an error text with a lone surrogate, NaN in an Outcome, 1e308, a set."""
    path = reward_file(
        """
        from slipstream.rewards.base import Outcome

        def sample(completion, task):
            if completion == "surrogate":
                raise ValueError("bad \\ud800")
            return {"nan": Outcome(value=float("nan")), "huge": 1e308, "fine": 1.0}[completion]

        def batch(completions):
            return {1.0} if len(completions) == 1 else [1.0] * len(completions)
        """
    )
    loaded = scorers(RewardSpec(f"{path}:sample", timeout_seconds=60))
    await loaded.start()
    pids = loaded.pools["sample"].pids
    scored = await loaded.score_group("p", ["surrogate", "nan", "huge", "fine"], {})
    assert [each.unscored for each in scored] == ["exception", "nonfinite", "out_of_range", ""]
    assert loaded.pools["sample"].pids == pids
    (alone,) = await scorers(RewardSpec(f"{path}:batch", timeout_seconds=60)).score_group("p", ["x"], {})
    assert (alone.reward, alone.unscored) == (None, "exception")


@pytest.mark.parametrize(
    ("weights", "reward", "reason"),
    [
        ({}, 1.5, ""),
        ({"a": 2.0}, 2.5, ""),
        ({"a": 0.0, "b": -1.0}, -0.5, ""),
        ({"a": 1e6, "b": 1e6}, None, "out_of_range"),
        ({"c": 3.0}, 1.5, ""),
    ],
)
async def test_named_rewards_are_summed_by_their_own_weights(weights: Any, reward: Any, reason: str) -> None:
    scorer = saying("f", Outcome(value=1.5, components={"a": 1.0, "b": 0.5, "none": None}))
    scorer.spec = dataclasses.replace(scorer.spec, weights=weights)
    (scored,) = await Scorers([scorer]).score_group("p", ["c"], {})
    assert (scored.reward, scored.unscored) == (reward, reason)
    assert scored.components == {"f": reward, "f.a": 1.0, "f.b": 0.5, "f.none": None}
