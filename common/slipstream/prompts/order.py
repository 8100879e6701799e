"""Orders that are computed, not stored: a seeded permutation of [0, n) for any n, with random access.

A Feistel network over the smallest power of two that holds n, walked until the value lies inside n (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It takes no memory, gives the same order on every machine
and library version (a resumed run depends on it), and works for a million rows as for the 10^30 questions of a
generator.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6


class Permutation:
    """A one-to-one map of [0, size) onto itself, decided by the seed string."""

    def __init__(self, size: int, seed: str) -> None:
        if size < 1:
            raise ValueError(f"size: {size}; a permutation needs at least one item")
        bits = (size - 1).bit_length()
        self.size = size
        self._low_bits = bits - bits // 2
        self._masks = ((1 << bits // 2) - 1, (1 << self._low_bits) - 1)
        self._bytes = self._low_bits // 8 + 2
        self._key = blake2b(seed.encode(), digest_size=32).digest()

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} outside of [0, {self.size})")
        value = self._mix(position)
        while value >= self.size:
            value = self._mix(value)
        return value

    def _mix(self, value: int) -> int:
        halves = [value >> self._low_bits, value & self._masks[1]]
        for turn in range(_ROUNDS):
            side = turn % 2
            halves[side] ^= self._hash(turn, halves[1 - side]) & self._masks[side]
        return halves[0] << self._low_bits | halves[1]

    def _hash(self, turn: int, half: int) -> int:
        data = bytes([turn]) + half.to_bytes(self._bytes, "little")
        digest = blake2b(data, digest_size=min(64, self._bytes), key=self._key).digest()
        return int.from_bytes(digest, "little")


class EpochOrder:
    """The endless order of a finite set: each epoch holds every index once, in an order of its own.

    Args:
        size: Prompts in the set.
        seed: Decides all epochs.
        shuffle: False keeps the set's own order in every epoch.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool = True) -> None:
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = {0: Permutation(size, f"epoch/{seed}/0")}

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, index) of the prompt at a position counted from the start of the run: a ticket's number."""
        if position < 0:
            raise IndexError(f"position {position} is before the start of the run")
        epoch, offset = divmod(position, self.size)
        return epoch, self._of(epoch)[offset] if self._shuffle else offset

    def _of(self, epoch: int) -> Permutation:
        if epoch not in self._epochs:
            newest = {number: order for number, order in self._epochs.items() if abs(number - epoch) == 1}
            self._epochs = {**newest, epoch: Permutation(self.size, f"epoch/{self._seed}/{epoch}")}
        return self._epochs[epoch]
