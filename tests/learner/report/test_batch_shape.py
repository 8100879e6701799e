"""What a batch looks like, by hand."""

from __future__ import annotations

import pytest

from slipstream.learner.report.batch_shape import LENGTH_BINS, shape_of


def test_ages_count_tokens_and_groups_count_by_their_oldest(make_group):
    fresh = make_group([1], [[5, 6], [7]], [1.0, 0.0], version=[[(7, 2)], [(7, 1)]])[0]
    mixed = make_group(
        [1], [[5, 6, 7], []], [1.0, 0.0], version=[[(4, 1), (6, 2)], []], finish=["length", "stop"]
    )[0]
    shape = shape_of([fresh, mixed], version=7, eta=2, longest=47)
    assert shape["ages"] == {"0": 3, "1": 2, "3": 1}
    assert shape["over_bound_groups"] == 0.5
    assert shape["over_bound_tokens"] == pytest.approx(1 / 6)
    assert shape["truncated"] == 0.25
    assert shape["components"] == {"reward": 0.5}
    assert sum(shape["lengths"]) == shape["samples"] == 4


def test_a_component_that_nothing_has_is_left_out_and_old_tokens_share_the_last_bin(make_group):
    group = make_group([1], [[5]], [None], version=[[(0, 1)]])[0]
    shape = shape_of([group], version=40, eta=2, longest=8)
    assert shape["components"] == {}
    assert shape["ages"] == {"16": 1}


def test_the_longest_completion_falls_into_the_last_bin(make_group):
    group = make_group([1], [[5] * 48], [1.0])[0]
    shape = shape_of([group], version=0, eta=0, longest=48)
    assert shape["lengths"][LENGTH_BINS - 1] == 1
