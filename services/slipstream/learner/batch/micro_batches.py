"""Scored groups to micro-batches of tensors: what goes through the model, and where its logprobs belong.

Shapes: R rows of L tokens in a micro-batch, S samples in it, T completion tokens of the longest of them,
N different (hidden state, next token) pairs, P prompt tokens, n actions of a sample.
Everything follows from lengths; no token id means padding (in some models pad and stop token are the same).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import MessageError
from slipstream.learner.batch.packing import Row, pack, row_length
from slipstream.learner.batch.tree import Completion, Ints, Tree, chains, grow
from slipstream.protocol.messages import Group, GroupArrays


def balance(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of the costs for each bin, such that the dearest bin costs little more than the cheapest.

    The two most uneven partial solutions are joined, the dear bins of one with the cheap bins of the other, until
    one is left. The same input gives the same bins on every rank. Within a bin indices are in order.

    Args:
        costs: One for each item, not negative.
        bins: How many, at least 1.
    """
    empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(bins)]
    heap = [(0.0, -1, empty)]
    for index, cost in enumerate(costs):
        heap.append((-cost, index, [(cost, [index]), *empty[1:]]))
    heapq.heapify(heap)
    number = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, items + more) for (a, items), (b, more) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda each: -each[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [sorted(items) for _, items in heap[0][2]]


Scored = Sequence[tuple[Group, GroupArrays]]


@dataclass(frozen=True)
class RowLayout:
    """How a model wants its batches.

    Attributes:
        budget: Most tokens of a micro-batch; changes memory, not the update.
        share: Whether samples may share tokens and rows, which needs a model that takes an attention mask.
        pair_cost: Cost of a query-key pair relative to a token's cost in the rest of the model.
    """

    budget: int
    share: bool
    pair_cost: float


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        samples_S: Rows of the global batch that are in here.
        tokens_RL: Input ids; padding is 0 and is seen by no other token.
        positions_RL: Positions, or None for plain rows, where they count from 0.
        mask_R1LL: True where a token (row) sees another (column), or None for plain causal rows.
        source_N: Index into the flattened [R * L] hidden states that predict.
        target_N: The ids they predict.
        pair_ST: For each action the pair that gives its logprob; 0 where `action_ST` is False.
        action_ST: Which entries are actions.
        tokens: Tokens without padding.
    """

    samples_S: Tensor
    tokens_RL: Tensor
    positions_RL: Tensor | None
    mask_R1LL: Tensor | None
    source_N: Tensor
    target_N: Tensor
    pair_ST: Tensor
    action_ST: Tensor
    tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of the pairs at each sample's actions [S, T], 0 elsewhere; shared pairs' gradients add up."""
        values_ST = values_N.index_select(0, self.pair_ST.flatten()).view(self.pair_ST.shape)
        return values_ST.where(self.action_ST, 0.0)


def completions_of(groups: Scored) -> list[list[Completion]]:
    """The completions of each group, numbered through the batch in order.

    Raises:
        MessageError: A group without a prompt, whose first tokens nothing could predict.
    """
    result, number = [], 0
    for group, arrays in groups:
        if not len(arrays.prompt_ids):
            raise MessageError(f"ticket {group.ticket}: the prompt is empty, nothing predicts the first token")
        ends = np.cumsum([sample.tokens for sample in group.samples])
        parts = np.split(arrays.token_ids.astype(np.int64), ends[:-1])
        result.append([Completion(number + index, part) for index, part in enumerate(parts)])
        number += len(parts)
    return result


Rows = list[Row]


def shares(groups: Scored, gradient_B: Sequence[bool], layout: RowLayout, ranks: int) -> list[list[Rows]]:
    """The rows of each rank's micro-batches, of about equal cost; ranks may differ in their number.

    Args:
        groups: The global batch.
        gradient_B: Which of its samples carry a gradient.
        layout: How the model wants it.
        ranks: Among how many to share.
    """
    trees = _trees(groups, gradient_B, layout)
    costs = [tree.size + layout.pair_cost * tree.size**2 for tree in trees]
    return [
        pack([trees[index] for index in share], layout.budget, layout.pair_cost, layout.share)
        for share in balance(costs, ranks)
    ]


def cost(batches: Sequence[Rows], pair_cost: float) -> float:
    """Cost of micro-batches, padding included, in tokens."""
    lengths = [(len(rows), max(row_length(row) for row in rows)) for rows in batches]
    return sum(count * (length + pair_cost * length**2) for count, length in lengths)


Pass = tuple[MicroBatch, bool]


def passes(shared: Sequence[Sequence[Rows]], rank: int) -> list[Pass]:
    """A rank's forward passes, and whether each counts.

    Sharded weights are gathered by all ranks together, so all make as many passes: where one has fewer, it repeats
    the smallest pass of all for nothing.
    """
    every = [rows for share in shared for rows in share]
    own = [(collate(rows), True) for rows in shared[rank]]
    missing = max(len(share) for share in shared) - len(own)
    if not missing:
        return own
    smallest = min(every, key=lambda rows: cost([rows], 0.0))
    return [*own, *[(collate(smallest), False)] * missing]


def _trees(groups: Scored, gradient_B: Sequence[bool], layout: RowLayout) -> list[Tree]:
    trees: list[Tree] = []
    for (_, arrays), completions in zip(groups, completions_of(groups), strict=True):
        chosen = [member for member in completions if gradient_B[member.sample] and len(member.actions)]
        prompt = arrays.prompt_ids.astype(np.int64)
        if layout.share:
            trees += grow(prompt, chosen, layout.budget, layout.pair_cost)
        else:
            trees += chains(prompt, chosen)
    return trees


def collate(rows: Sequence[Row]) -> MicroBatch:
    """The tensors of one micro-batch; see `MicroBatch`."""
    length = max(row_length(row) for row in rows)
    plain = all(len(row) == 1 and row[0].is_chain for row in rows)
    tokens_RL = np.zeros((len(rows), length), dtype=np.int64)
    positions_RL = np.zeros((len(rows), length), dtype=np.int64)
    mask_RLL = np.zeros((len(rows), 0 if plain else length, length), dtype=np.bool_)
    places: list[tuple[Completion, Ints]] = []
    for index, row in enumerate(rows):
        start = 0
        for tree in row:
            end = start + tree.size
            tokens_RL[index, start:end] = np.concatenate(tree.tokens)
            positions_RL[index, start:end] = np.concatenate(tree.depths)
            if not plain:
                mask_RLL[index, start:end, start:end] = tree.mask()
            offset = index * length + start
            places += [(member, path + offset) for member, path in zip(tree.members, tree.paths, strict=True)]
            start = end
    if not plain:
        # A padding token sees itself, because the softmax over nothing is not a number.
        mask_RLL[:, np.arange(length), np.arange(length)] = True
    source_N, target_N, pair_ST, action_ST = _pairs(places)
    return MicroBatch(
        samples_S=torch.tensor([member.sample for member, _ in places]),
        tokens_RL=torch.from_numpy(tokens_RL),
        positions_RL=None if plain else torch.from_numpy(positions_RL),
        mask_R1LL=None if plain else torch.from_numpy(mask_RLL)[:, None],
        source_N=source_N,
        target_N=target_N,
        pair_ST=pair_ST,
        action_ST=action_ST,
        tokens=sum(row_length(row) for row in rows),
    )


def _pairs(places: Sequence[tuple[Completion, Ints]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Different (source, target) pairs, and which pair belongs to each action."""
    counts_S = np.array([len(member.actions) for member, _ in places])
    source = np.concatenate([path for _, path in places])
    target = np.concatenate([member.actions for member, _ in places])
    base = int(target.max()) + 1
    key_N, inverse = np.unique(source * base + target, return_inverse=True)
    action_ST = np.arange(counts_S.max()) < counts_S[:, None]
    pair_ST = np.zeros(action_ST.shape, dtype=np.int64)
    pair_ST[action_ST] = inverse.reshape(-1)
    return (
        torch.from_numpy(key_N // base),
        torch.from_numpy(key_N % base),
        torch.from_numpy(pair_ST),
        torch.from_numpy(action_ST),
    )
