"""The shared layout gives each sample what it has by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config.sections.data_config import ModelSection
from slipstream.errors import MessageError
from slipstream.learner.batch.micro_batches import RowLayout, completions_of, passes, shares
from slipstream.learner.batch.packing import pack, row_length
from slipstream.learner.batch.tree import Completion, chains, grow
from slipstream.learner.model.model import Policy

SHARED = RowLayout(budget=4096, share=True, pair_cost=1e-3)


def micro_batches(groups, gradient_B, layout):
    """The micro-batches of a learner without other ranks."""
    return [batch for batch, _ in passes(shares(groups, gradient_B, layout, ranks=1), rank=0)]


def _width(groups):
    return max(sample.tokens for group, _ in groups for sample in group.samples)


def _count(groups):
    return sum(len(group.samples) for group, _ in groups)


def _logprobs(policy, groups, layout):
    """Logprobs [B, T] of every action through the layout's micro-batches."""
    result_BT = torch.zeros(_count(groups), _width(groups))
    for batch in micro_batches(groups, [True] * _count(groups), layout):
        hidden_ND = policy.hidden_states(batch).flatten(0, 1)[batch.source_N]
        table_NV = (hidden_ND @ policy.head_weight.T).log_softmax(-1)
        picked_N = table_NV.gather(1, batch.target_N[:, None]).squeeze(1)
        spread_ST = batch.spread(picked_N)
        columns_T = torch.arange(spread_ST.shape[1])
        result_BT = result_BT.index_put((batch.samples_S[:, None], columns_T), spread_ST)
    return result_BT


def _reference(policy, groups):
    """The same from one plain forward pass per sample."""
    result_BT = torch.zeros(_count(groups), _width(groups))
    row = 0
    for (_, arrays), completions in zip(groups, completions_of(groups), strict=True):
        for member in completions:
            ids = torch.tensor([*arrays.prompt_ids.tolist(), *member.actions.tolist()])
            table_TV = policy.module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            first = len(arrays.prompt_ids) - 1
            picked = table_TV[first:-1].gather(1, ids[first + 1 :, None]).squeeze(1)
            result_BT = result_BT.index_put((torch.tensor(row), torch.arange(len(picked))), picked)
            row += 1
    return result_BT


def _gradients(policy, logprobs_BT, weights_BT):
    policy.module.zero_grad(set_to_none=True)
    (logprobs_BT * weights_BT).sum().backward()
    return {name: value.grad.clone() for name, value in policy.parameters().items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        SHARED,
        RowLayout(budget=30, share=True, pair_cost=1e-3),
        RowLayout(budget=4096, share=True, pair_cost=10.0),
        RowLayout(budget=64, share=False, pair_cost=1e-3),
    ],
    ids=["one row", "small budget", "dear attention", "plain rows"],
)
def test_every_layout_equals_plain_forwards(make_llama, tmp_path, random_groups, attention, tied, layout):
    policy = Policy(make_llama(tmp_path, tie_word_embeddings=tied), ModelSection(attention=attention), "cpu")
    assert policy.shares
    groups = random_groups()
    ours_BT = _logprobs(policy, groups, layout)
    weights_BT = torch.linspace(-1, 1, ours_BT.numel()).view_as(ours_BT)
    ours = _gradients(policy, ours_BT, weights_BT)
    plain_BT = _reference(policy, groups)
    plain = _gradients(policy, plain_BT, weights_BT)
    assert torch.allclose(ours_BT, plain_BT, atol=1e-5)
    for name, gradient in plain.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_the_prompt_and_common_beginnings_are_computed_once(make_group):
    groups = [make_group([5, 6, 7], [[1, 2, 3], [1, 2, 4], [9, 1]], [0.0, 1.0, 0.0])]
    (batch,) = micro_batches(groups, [True] * 3, SHARED)
    assert sorted(batch.tokens_RL.flatten().tolist()) == [1, 2, 5, 6, 7, 9]
    # Different pairs: 7->1, 7->9, 1->2, 2->3, 2->4, 9->1; the two samples share the first two of theirs.
    assert len(batch.target_N) == 6
    assert batch.positions_RL.max() == 4


def test_identical_samples_are_one_sequence(make_group):
    groups = [make_group([5], [[1, 2]] * 4, [0.0, 1.0, 0.0, 1.0])]
    (batch,) = micro_batches(groups, [True] * 4, SHARED)
    assert batch.tokens == 2
    assert batch.mask_R1LL is None
    assert batch.action_ST.sum() == 8


def test_samples_without_gradient_and_empty_ones_are_left_out(make_group):
    """Case 46: an empty completion among others makes no index error and contributes no token."""
    groups = [make_group([5], [[], [1, 2], [3]], [0.0, 1.0, 0.0]), make_group([6], [[7], [8]], [1.0, 0.0], 1)]
    batches = micro_batches(groups, [True, True, False, False, True], SHARED)
    assert sorted(int(i) for batch in batches for i in batch.samples_S) == [1, 4]
    assert micro_batches(groups, [True, False, False, False, False], SHARED) == []


def test_stop_token_that_is_also_the_pad_token_is_trained(make_group):
    groups = [make_group([2, 2], [[2, 2], [1, 2]], [0.0, 1.0])]
    (batch,) = micro_batches(groups, [True, True], SHARED)
    assert batch.action_ST.all()
    assert (batch.target_N == 2).sum() == 3


def test_long_completions_get_rows_of_their_own():
    prompt = np.arange(4)
    rng = np.random.default_rng(0)
    members = [Completion(i, rng.integers(0, 1000, size=500)) for i in range(8)]
    assert len(grow(prompt, members, 10**6, pair_cost=1e-6)) == 1
    assert len(grow(prompt, members, 10**6, pair_cost=1e-2)) == 8
    assert len(grow(prompt, members, 1100, pair_cost=1e-6)) == 4


@pytest.mark.parametrize("share_rows", [True, False])
def test_micro_batches_hold_every_tree_within_the_budget(share_rows):
    rng = np.random.default_rng(1)
    members = [Completion(i, rng.integers(0, 1000, size=rng.integers(2, 90))) for i in range(40)]
    trees = chains(np.arange(3), members)
    packed = pack(trees, 200, 1e-3, share_rows)
    seen = sorted(tree.members[0].sample for rows in packed for row in rows for tree in row)
    assert seen == list(range(40))
    for rows in packed:
        assert len(rows) * max(row_length(row) for row in rows) <= 200


def test_a_tree_longer_than_the_budget_has_a_micro_batch_of_its_own():
    trees = chains(np.arange(3), [Completion(i, np.arange(n)) for i, n in enumerate([300, 5, 5])])
    packed = pack(trees, 100, 1e-3, True)
    assert [row_length(row) for row in packed[0]] == [302]
    assert len(packed) == 2


def test_empty_prompt_is_refused_by_ticket(make_group):
    with pytest.raises(MessageError, match="ticket 7"):
        completions_of([make_group([], [[1]], [1.0], ticket=7)])
