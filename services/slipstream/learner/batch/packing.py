"""Trees to micro-batches: rows of about equal length within a budget of tokens, cheapest arrangement first.

Several trees may stand in one row, since the mask keeps them apart: that avoids padding, but every token then
pays attention to the whole row. Shapes: R rows, L tokens of the longest row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slipstream.learner.batch.tree import Tree

Row = list[Tree]
MAX_LAYOUTS = 64


def pack(trees: Sequence[Tree], budget: int, pair_cost: float, share_rows: bool = True) -> list[list[Row]]:
    """Micro-batches, each a list of rows, with the longest trees first.

    Args:
        trees: What to pack; a tree longer than the budget gets a micro-batch of its own.
        budget: Most tokens of a micro-batch, padding included.
        pair_cost: Cost of one query-key pair relative to one token.
        share_rows: Whether trees may share a row; needs a model that takes a mask.
    """
    ordered = sorted(trees, key=lambda tree: -tree.size)
    batches: list[list[Tree]] = []
    room = 0
    for tree in ordered:
        need = tree.size if share_rows or not batches else batches[-1][0].size
        if need > room:
            batches.append([])
            need, room = tree.size, budget
        batches[-1].append(tree)
        room -= need
    return [
        _cheapest(batch, budget, pair_cost) if share_rows else [[tree] for tree in batch] for batch in batches
    ]


def row_length(row: Row) -> int:
    """Tokens in a row."""
    return sum(tree.size for tree in row)


def _cheapest(batch: Sequence[Tree], budget: int, pair_cost: float) -> list[Row]:
    """The number of rows with the least cost R (L + pair_cost L^2) among those within the budget."""
    best, best_cost = [list(batch)], float("inf")
    for count in range(1, min(len(batch), MAX_LAYOUTS) + 1):
        rows = _balance(batch, count)
        length = max(row_length(row) for row in rows)
        cost = count * (length + pair_cost * length * length)
        if (count == 1 or count * length <= budget) and cost < best_cost:
            best, best_cost = rows, cost
    return best


def _balance(batch: Sequence[Tree], count: int) -> list[Row]:
    """Spread trees (longest first) over rows, each to the row that is shortest so far."""
    rows: list[Row] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for tree in batch:
        length, index = heap[0]
        rows[index].append(tree)
        heapq.heapreplace(heap, (length + tree.size, index))
    return rows
