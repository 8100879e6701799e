"""Computed orders."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.prompts.order import EpochOrder, Permutation


@settings(deadline=None)
@given(st.integers(1, 600), st.text(max_size=8))
def test_permutation_holds_every_item_once(size, seed):
    permutation = Permutation(size, seed)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_permutation_of_a_huge_space_needs_no_memory_and_is_spread_out():
    size = 10**40
    values = [Permutation(size, "x")[i] for i in range(200)]
    assert len(set(values)) == 200
    assert 0.4 * size < sum(values) / 200 < 0.6 * size


def test_permutation_of_a_huge_space_rises_as_often_as_it_falls():
    values = [Permutation(10**12, "y")[i] for i in range(2000)]
    assert 900 < sum(value < 10**12 // 2 for value in values) < 1100
    assert 900 < sum(a < b for a, b in pairwise(values)) < 1100


def test_permutation_is_the_same_in_every_process_and_version():
    """A resumed run depends on these numbers: if they change, old checkpoints resume in another order."""
    assert [Permutation(10, "seed")[i] for i in range(10)] == [1, 0, 5, 4, 3, 2, 9, 8, 6, 7]


@pytest.mark.parametrize("position", [-1, 10])
def test_permutation_refuses_positions_outside(position):
    with pytest.raises(IndexError):
        Permutation(10, "")[position]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**63), st.integers(0, 10**6))
def test_every_index_comes_once_in_every_epoch(size, seed, epoch):
    order = EpochOrder(size, seed)
    places = [order.at(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert {found for found, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(size))


def test_neighbouring_epochs_may_be_asked_in_any_order():
    """Tickets of two epochs are open together."""
    order = EpochOrder(10, seed=1)
    asked = [0, 45, 12, 3, 31, 44, 9, 25]
    assert [order.at(position) for position in asked] == [EpochOrder(10, seed=1).at(p) for p in asked]


def test_no_prompts_and_a_position_before_the_start_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        EpochOrder(0, seed=0)
    with pytest.raises(IndexError, match="before the start"):
        EpochOrder(3, seed=0, shuffle=False).at(-1)


def test_epochs_have_no_repeats_and_orders_of_their_own():
    """Case 83."""
    order = EpochOrder(50, seed=3)
    drawn = [order.at(position) for position in range(120)]
    by_epoch = [[index for epoch, index in drawn if epoch == e] for e in range(3)]
    assert [len(indices) for indices in by_epoch] == [50, 50, 20]
    assert all(len(set(indices)) == len(indices) for indices in by_epoch)
    assert set(by_epoch[0]) == set(by_epoch[1]) == set(range(50))
    assert by_epoch[0] != by_epoch[1]
    assert by_epoch[0][:20] != by_epoch[2]
    again = EpochOrder(50, seed=3)
    assert [again.at(position) for position in reversed(range(120))] == drawn[::-1]
    assert [EpochOrder(50, seed=4).at(position) for position in range(120)] != drawn


def test_unshuffled_order_is_the_sets_own():
    order = EpochOrder(3, seed=0, shuffle=False)
    assert [order.at(p) for p in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
