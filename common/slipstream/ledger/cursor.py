"""From a ticket's number to its data row: a seeded bijection for each epoch, the same on every rerun.

Pure: no redis. Epoch = number // prompts. Up to `TABLE_LIMIT` rows the order is a numpy permutation; beyond, a
Feistel network over the next even power of two with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002), which needs no memory.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

TABLE_LIMIT = 1 << 20
ROUNDS = 6
_KEPT_EPOCHS = 2


class Cursor:
    """The order of the rows of a dataset, over all epochs.

    Args:
        prompts: Rows in the dataset.
        seed: The run's seed.
        table_limit: Rows up to which an epoch's order is held as a table.
    """

    def __init__(self, prompts: int, seed: int, table_limit: int = TABLE_LIMIT) -> None:
        if prompts < 1:
            raise ValueError(f"prompts is {prompts}; a dataset has at least one row")
        self.prompts = prompts
        self._seed = seed
        self._tabled = prompts <= table_limit
        self._half_bits = max(1, -(-(prompts - 1).bit_length() // 2))
        self._tables: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def locate(self, number: int) -> tuple[int, int]:
        """(epoch, row index) of a ticket number."""
        if number < 0:
            raise ValueError(f"ticket number {number} is negative")
        epoch, position = divmod(number, self.prompts)
        if self._tabled:
            return epoch, int(self._table(epoch)[position])
        return epoch, self._walk(epoch, position)

    def _table(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's order; two are kept, since tickets of neighbouring epochs are open together."""
        if epoch not in self._tables:
            generator = np.random.Generator(np.random.PCG64(self._epoch_seed(epoch)))
            self._tables[epoch] = generator.permutation(self.prompts)
            while len(self._tables) > _KEPT_EPOCHS:
                self._tables.popitem(last=False)
        return self._tables[epoch]

    def _walk(self, epoch: int, position: int) -> int:
        """Encrypt until the value is inside the dataset: fewer than four rounds on average."""
        key = self._epoch_seed(epoch).to_bytes(16, "little")
        value = self._encrypt(key, position)
        while value >= self.prompts:
            value = self._encrypt(key, value)
        return value

    def _encrypt(self, key: bytes, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(key, turn, right) & mask)
        return (left << self._half_bits) | right

    def _epoch_seed(self, epoch: int) -> int:
        text = f"slipstream cursor {self._seed} {epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def _mix(key: bytes, turn: int, value: int) -> int:
    digest = hashlib.blake2b(value.to_bytes(8, "little"), key=key, salt=bytes([turn]), digest_size=8).digest()
    return int.from_bytes(digest, "little")
