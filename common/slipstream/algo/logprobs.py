"""Log-probabilities and entropies of tokens without ever holding the logits of all tokens.

Work goes chunk by chunk over the tokens: logits of a chunk, their log-sum-exp in float32, the few entries that
are asked for; the backward makes the chunk's logits again. A batch small enough for `KEEP_BYTES` keeps its
softmax instead and saves that second product.
Shapes: N tokens, D hidden, V vocabulary, K targets of a token, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20  # logits of one chunk in float32: large enough for the head's matrix product
CACHE_BYTES = (
    2 << 20
)  # on a CPU, elementwise passes over logits go piece by piece, each small enough for the cache
KEEP_BYTES = 256 << 20  # below this, the softmax of all tokens is kept for the backward


def from_hidden(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at the targets, fused with the output head.

    Args:
        hidden_ND: Last hidden states of the tokens *before* the targets.
        weight_VD: Output head.
        targets: Ids [N], or [N, K] for several ids of each token (top-k heads).
        temperature: Divides the logits, as in the sampler.
        entropy: Also return the entropy [N], with gradient.
        keep_bytes: Most memory for keeping the softmax between forward and backward; 0 always recomputes.

    Returns:
        Logprobs in the shape of `targets`, float32 (float64 for float64 inputs), and entropy [N] or None.
    """
    targets_NK = targets[:, None] if targets.dim() == 1 else targets
    logprobs_NK, entropy_N = _apply(
        _FusedHead, hidden_ND, weight_VD, targets_NK, temperature, entropy, keep_bytes
    )
    return logprobs_NK.reshape(targets.shape), entropy_N if entropy else None


def from_logits(
    logits_NV: Tensor, targets: Tensor, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same from logits that exist already; the only full-size tensor made is their gradient."""
    targets_NK = targets[:, None] if targets.dim() == 1 else targets
    logprobs_NK, entropy_N = _apply(_FromLogits, logits_NV, targets_NK, temperature, entropy)
    return logprobs_NK.reshape(targets.shape), entropy_N if entropy else None


def _apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_NK: Tensor,
        temperature: float,
        entropy: bool,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        tokens, vocabulary = len(hidden_ND), len(weight_VD)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        keep = needed and tokens * vocabulary * dtype.itemsize <= keep_bytes
        kept: list[Tensor] = []
        logprobs_NK = hidden_ND.new_empty(targets_NK.shape, dtype=dtype)
        normaliser_N, entropy_N = (hidden_ND.new_zeros(tokens, dtype=dtype) for _ in range(2))
        for rows in _chunks(tokens, vocabulary):
            logits_CV = (hidden_ND[rows] @ weight_VD.T).to(dtype).div_(temperature)
            targets_CK = targets_NK[rows]
            _read(logits_CV, targets_CK, entropy, logprobs_NK[rows], normaliser_N[rows], entropy_N[rows])
            if keep:
                kept.append(_softmax_(logits_CV, normaliser_N[rows]))
        ctx.save_for_backward(hidden_ND, weight_VD, targets_NK, normaliser_N, entropy_N, *kept)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprobs_NK, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_NK, normaliser_N, entropy_N, *kept = ctx.saved_tensors
        hidden_grad_ND = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        weight_grad_VD = (
            torch.zeros_like(weight_VD, dtype=normaliser_N.dtype) if ctx.needs_input_grad[1] else None
        )
        busy_N = _busy(grad_NK, grad_entropy_N)
        entropy = ctx.entropy and bool(
            grad_entropy_N.any()
        )  # asked for as a metric alone it costs nothing here
        for number, rows in enumerate(_chunks(len(hidden_ND), len(weight_VD))):
            busy = busy_N[rows].nonzero()[:, 0] + rows.start
            if len(busy) == 0:
                continue
            hidden_CD = hidden_ND[busy]
            if kept:
                softmax_CV = kept[number][busy - rows.start]
            else:
                logits_CV = (hidden_CD @ weight_VD.T).to(normaliser_N.dtype).div_(ctx.temperature)
                softmax_CV = _softmax_(logits_CV, normaliser_N[busy])
            grad_entropy_C = grad_entropy_N[busy] if entropy else None
            grad_CV = _logit_grad_(softmax_CV, targets_NK[busy], grad_NK[busy], grad_entropy_C, entropy_N[busy])
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_ND.dtype)
            if hidden_grad_ND is not None:
                hidden_grad_ND[busy] = grad_CV @ weight_VD
            if weight_grad_VD is not None:
                _add_product_(weight_grad_VD, grad_CV.T, hidden_CD)
        weight_grad_VD = weight_grad_VD.to(weight_VD.dtype) if weight_grad_VD is not None else None
        return hidden_grad_ND, weight_grad_VD, None, None, None, None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_NK: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        tokens = len(logits_NV)
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        logprobs_NK = logits_NV.new_empty(targets_NK.shape, dtype=dtype)
        normaliser_N, entropy_N = (logits_NV.new_zeros(tokens, dtype=dtype) for _ in range(2))
        for rows in _pieces(logits_NV):
            logits_CV = logits_NV[rows].to(dtype)
            logits_CV = logits_CV / temperature if temperature != 1 else logits_CV
            targets_CK = targets_NK[rows]
            _read(logits_CV, targets_CK, entropy, logprobs_NK[rows], normaliser_N[rows], entropy_N[rows])
        ctx.save_for_backward(logits_NV, targets_NK, normaliser_N, entropy_N)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprobs_NK, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, targets_NK, normaliser_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        busy_N = _busy(grad_NK, grad_entropy_N)
        for rows in _pieces(logits_NV):
            logits_CV = logits_NV[rows].to(normaliser_N.dtype)
            logits_CV = logits_CV / ctx.temperature if ctx.temperature != 1 else logits_CV
            softmax_CV = (logits_CV - normaliser_N[rows, None]).exp_()
            grad_entropy_C = grad_entropy_N[rows] if ctx.entropy else None
            grad_CV = _logit_grad_(softmax_CV, targets_NK[rows], grad_NK[rows], grad_entropy_C, entropy_N[rows])
            grad_CV[~busy_N[rows]] = 0
            grad_NV[rows] = grad_CV.div_(ctx.temperature) if ctx.temperature != 1 else grad_CV
        return grad_NV, None, None, None


def _chunks(tokens: int, vocabulary: int, limit: int | None = None) -> list[slice]:
    """Slices of the tokens whose float32 logits take at most `limit` bytes (CHUNK_BYTES if None)."""
    size = max(1, (CHUNK_BYTES if limit is None else limit) // (4 * vocabulary))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _pieces(logits_CV: Tensor) -> list[slice]:
    """Slices of a chunk for elementwise passes: by cache on a CPU, the whole chunk on a GPU."""
    limit = CACHE_BYTES if logits_CV.device.type == "cpu" else CHUNK_BYTES
    return _chunks(len(logits_CV), logits_CV.shape[1], limit)


def _read(
    logits_CV: Tensor,
    targets_CK: Tensor,
    entropy: bool,
    logprobs_CK: Tensor,
    normaliser_C: Tensor,
    entropy_C: Tensor,
) -> None:
    """Fill in the logprobs of the targets, the log-sum-exp and, if asked for, the entropy."""
    for piece in _pieces(logits_CV):
        logits_PV = logits_CV[piece]
        normaliser_P = logits_PV.logsumexp(-1)
        normaliser_C[piece] = normaliser_P
        logprobs_CK[piece] = logits_PV.gather(-1, targets_CK[piece]) - normaliser_P[:, None]
        if entropy:
            probabilities_PV = (logits_PV - normaliser_P[:, None]).exp_()
            # An impossible id adds 0, not 0 * inf.
            finite_PV = logits_PV.clamp(min=torch.finfo(logits_PV.dtype).min)
            entropy_C[piece] = normaliser_P - probabilities_PV.mul_(finite_PV).sum(-1)


def _softmax_(logits_CV: Tensor, normaliser_C: Tensor) -> Tensor:
    """Softmax in place."""
    for piece in _pieces(logits_CV):
        logits_CV[piece].sub_(normaliser_C[piece, None]).exp_()
    return logits_CV


def _logit_grad_(
    softmax_CV: Tensor, targets_CK: Tensor, grad_CK: Tensor, grad_entropy_C: Tensor | None, entropy_C: Tensor
) -> Tensor:
    """d loss / d (logits / temperature), in place of the softmax: d log p_y = onehot_y - p, d H = -p (log p + H)."""
    total_C = grad_CK.sum(-1)
    for piece in _pieces(softmax_CV):
        softmax_PV, total_P = softmax_CV[piece], total_C[piece, None]
        if grad_entropy_C is None:
            softmax_PV.mul_(-total_P)
        else:
            log_PV = softmax_PV.clamp(min=torch.finfo(softmax_PV.dtype).tiny).log_()
            log_PV.add_(entropy_C[piece, None]).mul_(grad_entropy_C[piece, None]).add_(total_P)
            softmax_PV.mul_(log_PV.neg_())
    return softmax_CV.scatter_add_(-1, targets_CK, grad_CK.to(softmax_CV.dtype))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right; the sum over chunks stays in float32 for narrower factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _busy(grad_NK: Tensor, grad_entropy_N: Tensor) -> Tensor:
    """Tokens with any gradient [N]. Others are left out: cheaper, and a NaN of theirs cannot reach the weights."""
    return (grad_NK != 0).any(-1) | (grad_entropy_N != 0)
