"""The order of the data: a bijection for each epoch, on both sides of the table's limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ledger.cursor import Cursor

TABLE, FEISTEL = 1 << 20, 0


@pytest.mark.parametrize("limit", [TABLE, FEISTEL])
def test_an_epoch_wraps_without_a_repeat_and_in_a_new_order(limit):
    """Case 83: 50 prompts, 120 tickets."""
    cursor = Cursor(50, seed=7, table_limit=limit)
    places = [cursor.locate(number) for number in range(120)]
    assert [epoch for epoch, _ in places] == [0] * 50 + [1] * 50 + [2] * 20
    first, second, third = ([i for e, i in places if e == epoch] for epoch in range(3))
    assert sorted(first) == sorted(second) == list(range(50))
    assert len(set(third)) == 20
    assert first != second
    assert first[:20] != third
    rerun = Cursor(50, seed=7, table_limit=limit)
    assert [rerun.locate(number) for number in range(120)] == places
    other = Cursor(50, seed=8, table_limit=limit)
    assert [other.locate(number) for number in range(120)] != places


@given(
    prompts=st.integers(1, 400),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
    limit=st.sampled_from([TABLE, FEISTEL]),
)
@settings(max_examples=60, deadline=None)
def test_every_row_comes_once_an_epoch(prompts, seed, epoch, limit):
    cursor = Cursor(prompts, seed, table_limit=limit)
    places = [cursor.locate(number) for number in range(epoch * prompts, (epoch + 1) * prompts)]
    assert {found for found, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(prompts))


def test_epochs_that_overlap_may_be_asked_in_any_order():
    cursor = Cursor(10, seed=1)
    expected = {number: Cursor(10, seed=1).locate(number) for number in range(50)}
    asked = [0, 45, 12, 3, 31, 44, 9, 25]
    assert [cursor.locate(number) for number in asked] == [expected[number] for number in asked]


def test_a_huge_dataset_is_shuffled_without_a_table():
    prompts = 10**12
    cursor = Cursor(prompts, seed=3)
    indexes = [cursor.locate(number)[1] for number in range(2000)]
    assert all(0 <= index < prompts for index in indexes)
    assert len(set(indexes)) == 2000
    low = sum(index < prompts // 2 for index in indexes)
    assert 900 < low < 1100
    rising = sum(a < b for a, b in pairwise(indexes))
    assert 900 < rising < 1100


def test_a_dataset_without_rows_and_a_negative_number_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        Cursor(0, seed=0)
    with pytest.raises(ValueError, match="negative"):
        Cursor(3, seed=0).locate(-1)
