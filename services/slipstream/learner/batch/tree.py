"""Samples of one prompt as a prefix tree: every token that samples share is computed once.

A causal model's hidden state depends only on the tokens up to it. So the prompt, and any beginning that two
completions have in common, needs one forward and one backward pass, not one per sample; the samples' gradients
add up in the shared nodes by themselves. A completion's last token predicts nothing and is not in the tree.

Shapes: L nodes of a tree, P prompt tokens, n actions of a sample. Nodes are in an order where each comes after
its ancestors, so a tree is a row of tokens with its own attention mask and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Completion:
    """A sample that has a gradient: its index in the global batch and its action ids [n], n >= 1."""

    sample: int
    actions: Ints


@dataclass
class Tree:
    """A prompt and completions of it, as nodes.

    Attributes:
        tokens: Ids, in parts whose concatenation is [L].
        depths: Position of each node in its sequence, in parts like `tokens`.
        size: L.
        members: The completions.
        paths: Per member, the nodes [n] that predict its actions: the last prompt node, then its own.
    """

    prompt: Ints
    tokens: list[Ints] = field(default_factory=list)
    depths: list[Ints] = field(default_factory=list)
    size: int = 0
    members: list[Completion] = field(default_factory=list)
    paths: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._append(self.prompt, 0)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children, so that plain causal attention is right."""
        return self.size == len(self.prompt) - 1 + max(len(path) for path in self.paths)

    def add(self, member: Completion, overlap: int) -> None:
        """Add a completion whose first `overlap` actions are those of the member added before it."""
        shared = self.paths[-1][: overlap + 1] if self.paths else np.array([len(self.prompt) - 1])
        own = self._append(member.actions[overlap:-1], len(self.prompt) + overlap)
        self.members.append(member)
        self.paths.append(np.concatenate([shared, own]))

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which node (row) sees which (column) [L, L]: itself and its ancestors."""
        prompt = len(self.prompt)
        mask_LL = np.zeros((self.size, self.size), dtype=np.bool_)
        mask_LL[:prompt, :prompt] = np.tri(prompt, dtype=np.bool_)
        mask_LL[prompt:, :prompt] = True
        done = prompt
        for path in self.paths:
            own = path[1:]
            first = int(np.searchsorted(own, done))
            mask_LL[np.ix_(own[first:], own)] = np.tri(len(own), dtype=np.bool_)[first:]
            done = max(done, int(path[-1]) + 1)
        return mask_LL

    def _append(self, ids: Ints, depth: int) -> Ints:
        nodes = np.arange(self.size, self.size + len(ids))
        self.tokens.append(ids)
        self.depths.append(np.arange(depth, depth + len(ids)))
        self.size += len(ids)
        return nodes


def grow(prompt: Ints, completions: Sequence[Completion], limit: int, pair_cost: float) -> list[Tree]:
    """The completions of one prompt as as few trees as pay off.

    A completion joins the tree before it when that costs less than a tree of its own with the prompt repeated,
    where L tokens cost L + pair_cost * L^2; dense attention makes one big tree of long completions a bad deal.

    Args:
        prompt: Ids [P], P >= 1.
        completions: Any number, none of them empty.
        limit: Most nodes of a tree with more than one member.
        pair_cost: Cost of one query-key pair, relative to one token's cost in the rest of the model.
    """
    trees: list[Tree] = []
    previous = np.zeros(0, dtype=np.int64)
    for member in sorted(completions, key=_alphabetical):
        inputs = member.actions[:-1]
        overlap = common_prefix(previous, inputs)
        alone = len(prompt) + len(inputs)
        size = trees[-1].size if trees else limit
        joined = size + len(inputs) - overlap
        dearer = _cost(joined, pair_cost) - _cost(size, pair_cost) > _cost(alone, pair_cost)
        if not trees or joined > limit or dearer:
            trees.append(Tree(prompt))
            overlap = 0
        trees[-1].add(member, overlap)
        previous = inputs
    return trees


def chains(prompt: Ints, completions: Sequence[Completion]) -> list[Tree]:
    """Each completion as a tree of its own, for models that know only causal attention."""
    trees = []
    for member in completions:
        trees.append(Tree(prompt))
        trees[-1].add(member, 0)
    return trees


def common_prefix(first: Ints, second: Ints) -> int:
    """Length of the common beginning of two id arrays."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _alphabetical(member: Completion) -> bytes:
    """Sorting by ids puts each completion next to the one it shares most with."""
    return member.actions[:-1].astype(">i8").tobytes()


def _cost(size: int, pair_cost: float) -> float:
    return size + pair_cost * size * size
