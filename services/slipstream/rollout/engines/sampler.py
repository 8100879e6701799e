"""Draw tokens from logits, by counter: what is drawn depends on (seed, position, logits of the row) alone.

Shapes: V vocabulary, N rows, K blocks of the vocabulary, J entries of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 128
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one for each (seed, position), from two rounds of splitmix64 (Steele et al., 2014)."""
    seeds_N = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    positions_N = np.array(positions, dtype=np.uint64)
    bits_N = _mix(_mix(seeds_N) ^ positions_N)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits_N = bits_N + np.uint64(_GOLDEN)
    bits_N = (bits_N ^ (bits_N >> np.uint64(30))) * np.uint64(_MIX_1)
    bits_N = (bits_N ^ (bits_N >> np.uint64(27))) * np.uint64(_MIX_2)
    return bits_N ^ (bits_N >> np.uint64(31))


class Sampler:
    """Draws from logits; its scratch memory, as large as the logits, is kept between calls."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def draw(
        self, logits_VN: Tensor, temperatures: Sequence[float], uniforms_N: npt.NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        """Sample one token for each column, and its logprob after temperature (at temperature 1 when greedy).

        A column with a NaN gives a NaN logprob.
        """
        logits_VN = _scaled(logits_VN, temperatures)
        peaks_N = logits_VN.amax(dim=0)
        weights_KJN = self._weights(logits_VN, peaks_N)
        cumulated_KN = weights_KJN.sum(dim=1).double().cumsum(dim=0)
        ids_N = _invert(weights_KJN, cumulated_KN, torch.from_numpy(uniforms_N))
        if any(t == 0.0 for t in temperatures):
            greedy_N = torch.tensor([t == 0.0 for t in temperatures])
            ids_N = torch.where(greedy_N, logits_VN.argmax(dim=0), ids_N)
        chosen_N = logits_VN.gather(0, ids_N[None])[0]
        logprobs_N = (chosen_N - peaks_N).double() - cumulated_KN[-1].log()
        return ids_N.tolist(), logprobs_N.clamp(max=0.0).tolist()

    def heads(
        self, logits_VN: Tensor, temperatures: Sequence[float], counts: Sequence[int]
    ) -> list[tuple[tuple[int, float], ...]]:
        """The likeliest tokens of each column with their logprobs, `counts[n]` of them, likeliest first."""
        logprobs_VN = _scaled(logits_VN, temperatures).double().log_softmax(dim=0)
        values_KN, ids_KN = logprobs_VN.topk(min(max(counts), len(logits_VN)), dim=0)
        columns = zip(ids_KN.t().tolist(), values_KN.t().tolist(), counts, strict=True)
        return [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in columns]

    def _weights(self, logits_VN: Tensor, peaks_N: Tensor) -> Tensor:
        """exp(logit - largest of its column) in blocks, filled up with zeros."""
        size, rows = logits_VN.shape
        blocks = -(-size // BLOCK)
        if self._scratch.numel() < blocks * BLOCK * rows:
            self._scratch = torch.empty(blocks * BLOCK * rows)
        weights_VN = self._scratch[: blocks * BLOCK * rows].view(blocks * BLOCK, rows)
        torch.sub(logits_VN, peaks_N, out=weights_VN[:size])
        weights_VN[:size].exp_()
        weights_VN[size:] = 0.0
        return weights_VN.view(blocks, BLOCK, rows)


def _scaled(logits_VN: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logits after temperature; those of a greedy column as at temperature 1."""
    if all(t in (0.0, 1.0) for t in temperatures):
        return logits_VN
    return logits_VN * torch.tensor([1.0 / t if t else 1.0 for t in temperatures], dtype=logits_VN.dtype)


def _invert(weights_KJN: Tensor, cumulated_KN: Tensor, uniforms_N: Tensor) -> Tensor:
    """Invert the cumulated distribution: find the block, then the entry in it.

    Two levels read the vocabulary once and keep float32 sums short; an entry of weight zero is never chosen.
    """
    blocks, _, rows = weights_KJN.shape
    target_N = uniforms_N * cumulated_KN[-1]
    block_N = (cumulated_KN <= target_N).sum(dim=0).clamp_(max=blocks - 1)
    index_N = torch.arange(rows)
    inner_NJ = weights_KJN[block_N, :, index_N].double().cumsum(dim=1)
    before_N = torch.where(block_N > 0, cumulated_KN[block_N - 1, index_N], 0.0)
    entry_N = (inner_NJ <= (target_N - before_N)[:, None]).sum(dim=1)
    last_N = (inner_NJ < inner_NJ[:, -1:]).sum(dim=1)  # the last entry with any weight
    return block_N * BLOCK + torch.minimum(entry_N, last_N)
