"""The rewards of a batch apart, for objectives that normalise each by itself.

A function that returned a dict of named rewards counts as these, not as their sum. Shapes: B samples, K rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.algo.advantages import reward_tensor
from slipstream.errors import UserError
from slipstream.protocol.messages import Sample


def component_matrix(samples: Sequence[Sample], weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """The rewards [B, K], NaN where a sample has none, and their weights [K].

    Args:
        samples: All of the batch.
        weights: Of each function by its name, and of its named rewards as `function.name`; a named reward that is not
            listed has its function's. What no function of these returned is left out: it has no weight.

    Raises:
        UserError: The scored samples have fewer than two rewards, so that there is nothing to hold apart.
    """
    parts = {name: found for name in weights if (found := _parts_of(name, samples))}
    columns = list(_columns(samples, weights, parts))
    scored = any(sample.reward is not None for sample in samples)
    if scored and len(columns) < 2:
        raise UserError(
            f"objective.advantage gdpo needs two or more rewards, and the batch has {', '.join(columns) or 'none'}",
            "name a second function in reward.functions, or let one return a dict of named rewards",
        )
    rows = [[_value(sample, name, parts) for name in columns] for sample in samples]
    found = torch.stack([reward_tensor(row) for row in rows])
    return found, torch.tensor([_weight(name, weights) for name in columns])


def _parts_of(function: str, samples: Sequence[Sample]) -> set[str]:
    """Named rewards of a function, by their whole names."""
    return {name for sample in samples for name in sample.components if name.startswith(f"{function}.")}


def _columns(
    samples: Sequence[Sample], weights: Mapping[str, float], parts: Mapping[str, set[str]]
) -> Iterator[str]:
    """Names of the rewards, in the order of the functions: a function itself only where it returned a number."""
    for function in weights:
        if _functions_of(function, weights):
            continue
        own = parts.get(function, set())
        if not own or any(_value(sample, function, parts) is not None for sample in samples):
            yield function
        yield from sorted(own)


def _value(sample: Sample, name: str, parts: Mapping[str, set[str]]) -> float | None:
    """A reward of a sample; a function's sum does not count beside its parts."""
    if not parts.get(name, set()).isdisjoint(sample.components):
        return None
    return sample.components.get(name)


def _weight(name: str, weights: Mapping[str, float]) -> float:
    if name in weights:
        return weights[name]
    return weights[_functions_of(name, weights)[0]]


def _functions_of(name: str, weights: Mapping[str, float]) -> list[str]:
    """The function that a named reward is of; none where the name is a function's own."""
    return [function for function in weights if name.startswith(f"{function}.")]
