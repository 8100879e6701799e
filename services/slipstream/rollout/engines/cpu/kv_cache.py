"""Keys and values of the rows being decoded, in memory allocated once.

Row number s of the batch lies in slot s, so that the first B slots are the batch without gathering. Shapes:
L layers, S slots, C positions of a slot, K key/value heads, D head size.
"""

from __future__ import annotations

import torch


class KvCache:
    """`layers[l]` is [S, C, 2, K, D]: keys and values of one layer side by side.

    What no row uses is zero: attention reads up to the longest row, and a masked NaN would still be one.
    """

    def __init__(self, layers: int, slots: int, context: int, heads: int, head_size: int) -> None:
        self.context = context
        self._all_LSCW = torch.zeros(layers, slots, context, 2 * heads * head_size)
        self.layers = list(self._all_LSCW.view(layers, slots, context, 2, heads, head_size).unbind(0))
        self.flat_layers = list(self._all_LSCW.view(layers, slots * context, 2 * heads * head_size).unbind(0))

    def position(self, slot: int, index: int) -> int:
        """Row of `flat_layers` that holds one position of a slot."""
        return slot * self.context + index

    def clear(self, slot: int, length: int) -> None:
        """Make the first `length` positions of a slot zero again."""
        self._all_LSCW[:, slot, :length].zero_()

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of one slot to others."""
        if targets and length:
            self._all_LSCW[:, targets, :length] = self._all_LSCW[:, source : source + 1, :length]
