"""The rewards of a batch apart: functions, and the named rewards of those that return a dict."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo.advantages import gdpo
from slipstream.config.load import build
from slipstream.errors import ConfigError, UserError
from slipstream.learner.batch.components import component_matrix
from slipstream.protocol.messages import Sample


def sample(reward=1.0, **components):
    named = {name.replace("__", "."): value for name, value in components.items()}
    return Sample(tokens=1, finish="stop", versions=[(0, 1)], text="", reward=reward, components=named)


def lost():
    return Sample(
        tokens=1, finish="stop", versions=[(0, 1)], text="", unscored="timeout", components={"f": None}
    )


def table(matrix_BK):
    return [[None if math.isnan(value) else value for value in row] for row in matrix_BK.tolist()]


def test_named_rewards_of_one_function_stand_apart_and_their_sum_does_not():
    samples = [sample(f=1.5, f__right=1.0, f__short=0.5), sample(f=0.0, f__right=0.0, f__short=0.0)]
    matrix_BK, weights_K = component_matrix(samples, {"f": 2.0})
    assert table(matrix_BK) == [[1.0, 0.5], [0.0, 0.0]]
    assert weights_K.tolist() == [2.0, 2.0]


def test_named_rewards_have_their_own_weights():
    samples = [sample(f=1.5, f__right=1.0, f__short=0.5, g=3.0)]
    matrix_BK, weights_K = component_matrix(samples, {"f": 1.0, "g": 4.0, "f.short": 0.25, "f.typo": 9.0})
    assert table(matrix_BK) == [[1.0, 0.5, 3.0]]
    assert weights_K.tolist() == [1.0, 0.25, 4.0]


def test_a_name_that_only_some_samples_have_adds_nothing_to_the_others():
    samples = [sample(f=1.0, f__right=1.0), sample(f=0.5, f__short=0.5), sample(f=0.25), lost()]
    matrix_BK, _ = component_matrix(samples, {"f": 1.0})
    assert table(matrix_BK) == [[None, 1.0, None], [None, None, 0.5], [0.25, None, None], [None, None, None]]


def test_functions_that_return_numbers_are_as_they_were():
    matrix_BK, weights_K = component_matrix([sample(a=1.0, b=2.0), sample(a=0.0, b=None)], {"a": 1.0, "b": 0.5})
    assert table(matrix_BK) == [[1.0, 2.0], [0.0, None]]
    assert weights_K.tolist() == [1.0, 0.5]


def test_what_no_function_of_this_run_returned_has_no_weight():
    matrix_BK, _ = component_matrix([sample(a=1.0, b=2.0, old=7.0)], {"a": 1.0, "b": 1.0})
    assert table(matrix_BK) == [[1.0, 2.0]]


def test_one_reward_alone_is_refused_by_name():
    with pytest.raises(UserError, match="two or more rewards, and the batch has f;"):
        component_matrix([sample(f=1.0)], {"f": 1.0})


def test_a_batch_that_could_not_be_scored_is_no_mistake():
    matrix_BK, weights_K = component_matrix([lost(), lost()], {"f": 1.0})
    assert gdpo(matrix_BK, weights_K, torch.tensor([0, 0]), torch.full((2,), math.nan)).tolist() == [0.0, 0.0]


def test_a_dict_trains_as_two_functions_of_the_same_numbers_do():
    rows = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
    groups_B, rewards_B = (
        torch.tensor([0, 0, 0, 0]),
        torch.tensor([sum(row) for row in rows], dtype=torch.float64),
    )
    as_dict = component_matrix([sample(f=a + b, f__a=a, f__b=b) for a, b in rows], {"f": 1.0, "f.b": 0.5})
    apart = component_matrix([sample(a=a, b=b) for a, b in rows], {"a": 1.0, "b": 0.5})
    assert gdpo(*as_dict, groups_B, rewards_B).tolist() == gdpo(*apart, groups_B, rewards_B).tolist()


def config_with(*functions, recipe="gdpo"):
    tree = {
        "data": {"kind": "arithmetic"},
        "objective": {"recipe": recipe},
        "reward": {"functions": list(functions)},
    }
    return build(tree)


def test_one_function_of_ones_own_may_be_several_rewards():
    config_with({"use": "mine.py:score"})
    with pytest.raises(ConfigError, match="two or more reward components, got 1"):
        config_with({"use": "math"})


def test_a_name_that_could_mean_two_rewards_is_refused():
    with pytest.raises(ConfigError, match=r"'f\.right' would also be the named reward 'right' of 'f'"):
        config_with({"use": "mine.py:f"}, {"use": "mine.py:g", "name": "f.right"})


def test_weights_of_a_reward_that_returns_a_number_have_no_effect():
    _, warnings = config_with({"use": "math", "weights": {"a": 2.0}}, recipe="grpo")
    assert any("reward.functions.0.weights" in line for line in warnings)
