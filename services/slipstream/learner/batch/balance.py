"""Work shared out evenly: the differencing method of Karmarkar and Karp (1982) over several bins."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
