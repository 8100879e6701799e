"""Several rewards together, and user functions through their worker processes."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import Failures, Outcome, RewardSpec, Scored
from slipstream.rewards.scorers import Scorer, Scorers

Load = Callable[..., Scorers]
File = Callable[[str], str]


def fixed(
    name: str, outcomes: dict[str, Outcome], weight: float = 1.0, failures: Failures | None = None
) -> Scorer:
    """A reward that says what the table holds for a completion."""
    spec = RewardSpec(name, weight=weight)
    return Scorer(spec, name, failures or Failures(), lambda completion, task: outcomes[completion], None)


async def summed(*scorers: Scorer, completion: str = "c") -> Scored:
    return (await Scorers(list(scorers)).score_group("p", [completion], {}))[0]


async def test_rewards_are_summed_with_their_weights() -> None:
    scored = await summed(
        fixed("right", {"c": Outcome(value=1.0)}, weight=2.0),
        fixed("form", {"c": Outcome(value=0.5, components={"length": 0.5}, flags=("long",))}, weight=-1.0),
    )
    assert scored == Scored(1.5, {"right": 1.0, "form": 0.5, "form.length": 0.5}, flags=("form:long",))


async def test_a_reward_that_does_not_apply_is_left_out() -> None:
    scored = await summed(
        fixed("a", {"c": Outcome(value=1.0)}), fixed("b", {"c": Outcome(status="not_applicable")})
    )
    assert scored == Scored(1.0, {"a": 1.0, "b": None})


async def test_a_sample_that_no_reward_applies_to_is_unscored_and_not_0() -> None:
    """Case 6."""
    scored = await summed(fixed("a", {"c": Outcome(status="not_applicable")}))
    assert (scored.reward, scored.unscored) == (None, "not_applicable")


@pytest.mark.parametrize("status", ["exception", "timeout", "memory", "nonfinite", "worker_lost"])
async def test_a_failed_reward_leaves_the_whole_sample_unscored(status: Any) -> None:
    """Case 6: the sum of the rest would look like a worse answer."""
    scored = await summed(
        fixed("a", {"c": Outcome(value=1.0)}), fixed("b", {"c": Outcome(status=status, detail="why")})
    )
    assert (scored.reward, scored.unscored, scored.detail) == (None, status, "b: why")
    assert scored.components == {"a": 1.0, "b": None}


async def test_a_reward_of_weight_0_only_reports() -> None:
    scored = await summed(
        fixed("a", {"c": Outcome(value=1.0)}), fixed("b", {"c": Outcome(status="exception")}, weight=0.0)
    )
    assert scored.reward == 1.0


async def test_a_failure_policy_gives_a_number_and_leaves_a_flag() -> None:
    """Case 3: an answer that no grader can work out is wrong; the flag lets it be counted."""
    failing = {"c": Outcome(status="timeout", detail="took long")}
    scored = await summed(fixed("a", failing, failures=Failures(timeout=0.0)))
    assert (scored.reward, scored.unscored, scored.flags) == (0.0, "", ("a:timeout",))
    assert (await summed(fixed("a", failing))).unscored == "timeout"


def test_a_policy_never_hides_an_exception() -> None:
    """Case 24."""
    outcome = Outcome(status="exception", detail="KeyError: 'B9'")
    assert Failures(timeout=0.0, memory=0.0, worker_lost=0.0).apply(outcome) == outcome


async def test_an_empty_group_of_rewards_is_refused() -> None:
    with pytest.raises(UserError, match="last_number"):
        Scorers.load([])


@pytest.mark.process
async def test_both_forms_sync_and_async(scorers: Load, reward_file: File) -> None:
    path = reward_file(
        """
        import asyncio

        def batch(prompts, completions, answer, **rest):
            return [float(c == a) if c else None for c, a in zip(completions, answer)]

        async def async_batch(completions, answer):
            await asyncio.sleep(0)
            return [len(c) for c in completions]

        def sample(completion, task):
            return {"right": completion == task.columns["answer"], "asked": task.prompt == "2 + 2 ="}

        async def async_sample(completion, task, scale=1.0):
            await asyncio.sleep(0)
            return scale * len(completion)
        """
    )
    loaded = scorers(
        RewardSpec(f"{path}:batch"),
        RewardSpec(f"{path}:async_batch", weight=0.0),
        RewardSpec(f"{path}:sample", weight=0.0, weights={"right": 1.0}),
        RewardSpec(f"{path}:async_sample", name="size", weight=10.0, options={"scale": 0.5}),
    )
    await loaded.start()
    right, wrong, empty = await loaded.score_group("2 + 2 =", ["4", "five", ""], {"answer": "4", "other": 1})
    assert right.components == {
        "batch": 1.0,
        "async_batch": 1.0,
        "sample": 2.0,
        "sample.right": 1.0,
        "sample.asked": 1.0,
        "size": 0.5,
    }
    assert [right.reward, wrong.reward, empty.reward] == [6.0, 20.0, 0.0]
    assert (empty.components["batch"], empty.unscored) == (None, "")


@pytest.mark.process
async def test_none_and_nan_leave_the_group_and_never_count_as_0(scorers: Load, reward_file: File) -> None:
    """Case 5 and Case 6: a plugin's NaN, infinity and None, beside a wrong answer's real 0."""
    path = reward_file(
        """
        def reward(completion, task):
            known = {"good": 1.0, "bad": 0.0, "skip": None}
            return known[completion] if completion in known else float(completion)
        """
    )
    scored = await scorers(RewardSpec(f"{path}:reward")).score_group(
        "p", ["good", "skip", "bad", "nan", "-inf"], {}
    )
    assert [sample.reward for sample in scored] == [1.0, None, 0.0, None, None]
    assert [sample.unscored for sample in scored] == ["", "not_applicable", "", "nonfinite", "nonfinite"]
    assert all(sample.reward is None or math.isfinite(sample.reward) for sample in scored)


@pytest.mark.process
async def test_a_scorer_that_throws_leaves_the_sample_unscored_with_the_cause(
    scorers: Load, reward_file: File
) -> None:
    """Case 24: every third call throws; the rest is scored."""
    path = reward_file(
        """
        calls = 0

        def reward(completion, task):
            global calls
            calls += 1
            return {"A1": 1.0}["B9" if calls % 3 == 0 else "A1"]
        """
    )
    loaded = scorers(RewardSpec(f"{path}:reward"))
    scored = await loaded.score_group("p", ["a", "b", "c", "d", "e", "f"], {})
    assert sorted(sample.unscored for sample in scored) == ["", "", "", "", "exception", "exception"]
    assert {sample.detail for sample in scored if sample.unscored} == {
        "reward: KeyError: 'B9' (my_reward.py:7)"
    }


@pytest.mark.process
async def test_a_missing_column_is_named_for_a_user_function(scorers: Load, reward_file: File) -> None:
    path = reward_file("def reward(completions, answer): return [1.0] * len(completions)")
    scored = (await scorers(RewardSpec(f"{path}:reward")).score_group("p", ["a"], {"gold": 1}))[0]
    assert scored.unscored == "exception"
    assert "'answer'" in scored.detail


@pytest.mark.process
async def test_a_dotted_path_is_found_from_the_working_folder(
    scorers: Load, reward_file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = reward_file("def reward(completions): return [1.0] * len(completions)")
    monkeypatch.chdir(path.rsplit("/", 1)[0])
    scored = await scorers(RewardSpec("my_reward:reward")).score_group("p", ["a"], {})
    assert scored[0].reward == 1.0


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def reward(text, gold): return 1.0", ["(text, gold)", "f(completion, task)"]),
        ("import no_such_package", ["no_such_package"]),
        ("print('x' * 10**6); import sys; sys.exit('gone')", ["importing", "SystemExit: gone"]),
        ("def other(completion): return 1.0", ["'reward'", "other"]),
    ],
)
def test_a_bad_function_is_refused_at_load(reward_file: File, code: str, words: list[str]) -> None:
    path = reward_file(code)
    with pytest.raises(UserError) as caught:
        Scorers.load([RewardSpec(f"{path}:reward")])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.process
async def test_a_slow_function_is_unscored_unless_the_spec_says_0(scorers: Load, reward_file: File) -> None:
    """A user's scorer that times out says nothing about the answer."""
    path = reward_file("import time\ndef reward(completion): time.sleep(600)")
    use = f"{path}:reward"
    loaded = scorers(RewardSpec(use, name="a", timeout_seconds=0.1, weight=0.0), RewardSpec("exact_match"))
    assert (await loaded.score_group("p", ["x"], {"answer": "x"}))[0].reward == 1.0
    scored = (await scorers(RewardSpec(use, timeout_seconds=0.1)).score_group("p", ["x"], {}))[0]
    assert (scored.reward, scored.unscored) == (None, "timeout")
    zero = scorers(RewardSpec(use, timeout_seconds=0.1, on_timeout="zero"))
    assert (await zero.score_group("p", ["x"], {}))[0].reward == 0.0


@pytest.mark.process
async def test_one_slow_sample_of_an_async_function_costs_no_other(scorers: Load, reward_file: File) -> None:
    path = reward_file(
        """
        import asyncio

        async def reward(completion, task):
            await asyncio.sleep(600 if completion == "slow" else 0)
            return 1.0
        """
    )
    loaded = scorers(RewardSpec(f"{path}:reward", timeout_seconds=3.0))
    await loaded.start()
    pids = loaded.pools["reward"].pids
    scored = await loaded.score_group("p", ["fast", "slow", "fast"], {})
    assert [sample.reward for sample in scored] == [1.0, None, 1.0]
    assert scored[1].unscored == "timeout"
    assert loaded.pools["reward"].pids == pids
