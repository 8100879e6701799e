"""Which parameters are trained, by which optimizer, and with which rate and decay: all by patterns over their names.

Patterns are those of a shell (`fnmatch`): `*` stands for anything, dots too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from slipstream.config.sections.steps_config import OptimizerSection
from slipstream.errors import UserError
from slipstream.learner.model.patterns import matching

Parameters = Mapping[str, nn.Parameter]


def freeze(parameters: Parameters, patterns: Sequence[str]) -> None:
    """Take parameters out of training: no gradient, no moments, no part in the norm; they are published as they are.

    Raises:
        UserError: A pattern that matches nothing, or nothing is left to train.
    """
    for pattern in patterns:
        for name in matching(pattern, parameters, "learner.freeze"):
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"learner.freeze {list(patterns)} leaves nothing to train", "freeze less")


def hidden_matrices(module: nn.Module, names: Mapping[str, nn.Parameter]) -> set[str]:
    """Names of the matrices inside the model: no embedding, no output head, nothing of other than two dimensions."""
    outer = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    head = getattr(module, "get_output_embeddings", lambda: None)()
    outside = {id(part.weight) for part in [*outer, *([] if head is None else [head])]}
    return {name for name, value in names.items() if value.ndim == 2 and id(value) not in outside}


def torch_groups(parameters: Parameters, settings: OptimizerSection) -> list[dict[str, Any]]:
    """Parameters as torch's optimizers take them, in groups of equal `factor` (on the rate) and `weight_decay`.

    Of several patterns that match a parameter the first counts. Vectors (norms, biases) have no decay but one that a
    pattern gives them.
    """
    terms = {name: (1.0, settings.weight_decay if p.ndim > 1 else 0.0) for name, p in parameters.items()}
    for name, own in _by_pattern(parameters, settings).items():
        decay = terms[name][1] if own.weight_decay is None else own.weight_decay
        terms[name] = (own.rate_factor, decay)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, term in terms.items():
        groups.setdefault(term, []).append(parameters[name])
    return [
        {"params": members, "factor": factor, "weight_decay": decay}
        for (factor, decay), members in groups.items()
    ]


def _by_pattern(parameters: Parameters, settings: OptimizerSection) -> dict[str, Any]:
    """The first group that names each parameter."""
    found: dict[str, Any] = {}
    for group in settings.groups:
        for name in parameters:
            if fnmatchcase(name, group.match):
                found.setdefault(name, group)
    return found


def check_groups(names: Collection[str], settings: OptimizerSection) -> None:
    """Refuse a pattern that does nothing.

    Raises:
        UserError: It matches no parameter, or only such as an earlier one took.
    """
    left = set(names)
    for group in settings.groups:
        found = matching(group.match, names, "learner.optimizer.groups")
        if not left.intersection(found):
            raise UserError(
                f"learner.optimizer.groups: {group.match!r} matches only what an earlier pattern took",
                "put it before that one",
            )
        left.difference_update(found)
