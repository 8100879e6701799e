from __future__ import annotations

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.prompts.fitting import reward_specs
from slipstream.protocol.headers import decode_header
from slipstream.protocol.messages import Group, Sample
from slipstream.protocol.questions import EvaluationResult
from slipstream.reward.group_scoring import NamedRewards, Strikes, apply_scores, evaluation_result
from slipstream.rewards.base import Scored


def group_of(*unscored: str, finish: str = "stop") -> Group:
    samples = [
        Sample(tokens=0, finish=finish, versions=[], text=f"text {index}", unscored=reason)
        for index, reason in enumerate(unscored)
    ]
    return Group(run="r", ticket=1, attempt=0, prompt_index=0, owner="o", admitted_version=0, samples=samples)


def test_a_reward_of_the_config_is_one_of_the_scorers_with_all_it_says():
    said = {
        "use": "math",
        "name": "right",
        "weight": 0.5,
        "options": {"library": False},
        "timeout_seconds": 2.0,
        "memory_mb": 256,
        "on_timeout": "unscored",
    }
    tree = {"run": {"steps": 1}, "data": {"kind": "arithmetic"}, "reward": {"functions": [said]}}
    (spec,) = reward_specs(build(tree)[0])
    assert {name: getattr(spec, name) for name in said} == said


def test_scores_go_to_the_samples_that_were_scored_and_to_no_other():
    """Cases 5 and 6: what failed before keeps its reason, what fails now gets one, and neither is a 0."""
    group = group_of("", "aborted", "")
    apply_scores(group, [Scored(0.0, {"a": 0.0}), Scored(None, {"a": None}, "exception", "KeyError")])
    assert [(sample.reward, sample.unscored) for sample in group.samples] == [
        (0.0, ""),
        (None, "aborted"),
        (None, "exception"),
    ]
    assert group.scored_rewards == [0.0]


def test_a_count_of_scores_that_does_not_fit_is_never_padded():
    with pytest.raises(ValueError, match="zip"):
        apply_scores(group_of("", ""), [Scored(1.0, {})])


def test_an_evaluation_result_says_what_was_unscored_and_what_was_cut_off():
    group = group_of("", finish="length")
    group.samples[0].reward = 0.5
    result = decode_header(evaluation_result(group), EvaluationResult)
    assert (result.reward, result.truncated, result.text) == (0.5, True, "text 0")
    assert decode_header(evaluation_result(group_of("aborted")), EvaluationResult).reward is None


def strikes_after(reasons: list[str], window: int = 4, share: float = 0.5) -> list[str]:
    strikes = Strikes(window, share)
    return [strikes.note("rollout-0", reason) for reason in reasons]


def test_scoring_that_breaks_stops_the_run_with_the_main_reason():
    """Case 24: more than the allowed share of a window is unscored."""
    causes = strikes_after(["exception", "", "exception", "timeout"])
    assert causes[:3] == ["", "", ""]
    assert causes[3].startswith("3 of the last 4 samples are unscored")
    assert "reward.max_unscored_share 0.5;" in causes[3]
    assert "exception (2)" in causes[3]


@pytest.mark.parametrize(
    "reasons",
    [
        ["exception", "exception", "exception"],  # the window is not full
        ["exception", "", "exception", ""],  # just the allowed share
        ["exception", "exception", "", "", ""],
    ],
)
def test_scoring_that_mostly_works_goes_on(reasons):
    assert not any(strikes_after(reasons))


def test_old_strikes_leave_the_window():
    assert not any(strikes_after(["exception", "exception", "", "", "exception", ""]))


def test_the_config_names_the_rewards():
    tree = {
        "run": {"steps": 1},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number", "weight": 2.0, "timeout_seconds": 3.0}]},
    }
    (spec,) = reward_specs(build(tree)[0])
    assert (spec.use, spec.weight, spec.timeout_seconds) == ("last_number", 2.0, 3.0)


def names_of(weights: dict[str, float]) -> NamedRewards:
    function = {"use": "mine.py:f", "weights": weights}
    return NamedRewards(
        build({"data": {"kind": "arithmetic"}, "reward": {"functions": [function]}})[0].reward.functions
    )


def test_a_weight_for_a_name_that_never_appears_is_refused_with_those_that_do():
    names = names_of({"right": 2.0, "shrot": 0.5})
    returned = {"f": 1.0, "f.right": 1.0, "f.short": 0.0}
    for _ in range(199):
        names.note(returned)
    with pytest.raises(UserError) as caught:
        names.note(returned)
    for word in ("reward.functions.0.weights", "'shrot'", "right, short"):
        assert word in str(caught.value)


def test_a_weight_for_a_name_that_appears_now_and_then_is_right():
    names = names_of({"right": 2.0, "rare": 0.5})
    for turn in range(1000):
        names.note({"f": 1.0, "f.right": 1.0} | ({"f.rare": 1.0} if turn == 150 else {}))


def test_one_generator_whose_samples_cannot_be_scored_does_not_stop_those_of_others():
    """A member gone bad that sends rows without their gold makes its own samples unscored, and no others."""
    strikes = Strikes(8, 0.5)
    bad, good = ("rollout-1", "exception"), ("rollout-0", "")
    assert not any(strikes.note(*sample) for sample in [bad, bad, bad, good] * 10)


def test_scoring_that_breaks_for_every_generator_stops_the_run():
    strikes = Strikes(8, 0.5)
    samples = [("rollout-0", "exception"), ("rollout-1", "exception"), ("rollout-1", "")] * 4
    assert any(strikes.note(*sample) for sample in samples)
