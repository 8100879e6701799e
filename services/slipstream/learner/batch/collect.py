"""Scored groups to the global batch that the objective is prepared on.

Shapes: B samples of all groups in order, T completion tokens of the longest, K reward components or likeliest ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from slipstream.algo.advantages import reward_tensor
from slipstream.algo.prepare import GlobalBatch
from slipstream.errors import UserError
from slipstream.learner.batch.components import component_matrix
from slipstream.learner.batch.micro_batches import Scored
from slipstream.protocol.messages import expand_versions
from slipstream.staleness import Lost, age


def global_batch(
    groups: Scored,
    version: int,
    max_age: int | None,
    component_weights: Mapping[str, float] | None = None,
    lost: Lost = (),
    heads: bool = False,
) -> GlobalBatch:
    """All samples of the groups, padded by length.

    Args:
        groups: At least one.
        version: The learner's version, from which the ages of tokens follow.
        max_age: Age above which a token loses its weight; None masks none.
        component_weights: Weight of each reward by name, and of named rewards of one as `reward.name` where they have
            their own, for objectives that need them apart.
        lost: Versions that restarts took out of the line of descent.
        heads: Whether the objective needs the sampler's likeliest tokens.

    Raises:
        StalenessError: A token of a version that does not exist yet.
        UserError: Only one reward where they are needed apart, or a group without the likeliest tokens.
    """
    samples = [sample for group, _ in groups for sample in group.samples]
    lengths = np.array([sample.tokens for sample in samples])
    token_BT = np.arange(lengths.max()) < lengths[:, None]
    logprobs = np.concatenate([arrays.logprobs for _, arrays in groups])
    versions = np.concatenate([expand_versions(sample.versions) for sample in samples])
    sizes = [len(group.samples) for group, _ in groups]
    components_BK, weights_K = (
        (None, None) if component_weights is None else component_matrix(samples, component_weights)
    )
    batch = GlobalBatch(
        rewards_B=reward_tensor([sample.reward for sample in samples]),
        groups_B=torch.from_numpy(np.repeat(np.arange(len(groups)), sizes)),
        lengths_B=torch.from_numpy(lengths),
        sampler_BT=_padded(logprobs, token_BT, np.dtype(np.float32)),
        truncated_B=torch.tensor([sample.finish != "stop" for sample in samples]),
        ages_BT=_padded(_ages(version, versions, lost), token_BT, np.dtype(np.int64)),
        max_age=max_age,
        components_BK=components_BK,
        component_weights_K=weights_K,
        head_sampler_BTK=_head_logprobs(groups, token_BT) if heads else None,
        in_head_BT=_in_head(groups, token_BT) if heads else None,
    )
    return batch


def head_ids(groups: Scored) -> Tensor:
    """The sampler's likeliest ids of each token [B, T, K]; 0 beyond a sample's end.

    Raises:
        UserError: A group came without them, or with another number than the first.
    """
    _check_heads(groups)
    found = [arrays.head_ids for _, arrays in groups if arrays.head_ids is not None]
    token_BT = _tokens(groups)
    ids_BTK = np.zeros((*token_BT.shape, found[0].shape[1]), dtype=np.int64)
    ids_BTK[token_BT] = np.concatenate(found)
    return torch.from_numpy(ids_BTK)


def _head_logprobs(groups: Scored, token_BT: np.ndarray) -> Tensor:
    """Their logprobs [B, T, K]; -inf beyond a sample's end."""
    _check_heads(groups)
    found = [arrays.head_logprobs for _, arrays in groups if arrays.head_logprobs is not None]
    logprobs_BTK = np.full((*token_BT.shape, found[0].shape[1]), -np.inf, dtype=np.float32)
    logprobs_BTK[token_BT] = np.concatenate(found)
    return torch.from_numpy(logprobs_BTK)


def _in_head(groups: Scored, token_BT: np.ndarray) -> Tensor:
    """Where the sampled token is one of the likeliest [B, T]."""
    found = [
        ((a.head_ids == a.token_ids[:, None]) & np.isfinite(a.head_logprobs)).any(1)
        for _, a in groups
        if a.head_ids is not None and a.head_logprobs is not None
    ]
    return _padded(np.concatenate(found), token_BT, np.dtype(np.bool_))


def _check_heads(groups: Scored) -> None:
    wanted = groups[0][0].head
    for group, _ in groups:
        if not group.head or group.head != wanted:
            raise UserError(
                f"ticket {group.ticket} came with {group.head} likeliest tokens, another with {wanted}; "
                "the objective needs the same number from all",
                "keep sampling.top_logprobs as it was when the run's buffer was filled, or start a new run",
            )


def _tokens(groups: Scored) -> np.ndarray:
    """Where samples have tokens [B, T]."""
    lengths = np.array([sample.tokens for group, _ in groups for sample in group.samples])
    return np.arange(lengths.max()) < lengths[:, None]


def _ages(version: int, versions: np.ndarray, lost: Lost) -> np.ndarray:
    """Age of each token [N]; a batch holds few different versions."""
    different, at = np.unique(versions, return_inverse=True)
    return np.array([age(version, int(each), lost) for each in different], dtype=np.int64)[at]


def _padded(values: np.ndarray, token_BT: np.ndarray, dtype: np.dtype) -> Tensor:
    padded_BT = np.zeros(token_BT.shape, dtype=dtype)
    padded_BT[token_BT] = values
    return torch.from_numpy(padded_BT)
