"""What every engine that computes a model refuses before it begins: a request, or weights, that do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError, WeightsError
from slipstream.models.architecture import read_architecture, text_part
from slipstream.models.tensors import LEFT_OUT, Shapes, tensor_shapes

if TYPE_CHECKING:
    from slipstream.rollout.engines.base import GroupRequest, ServedWeights


def check_request(request: GroupRequest, context: int, vocabulary: int) -> None:
    """Refuse a request that the model cannot take.

    Raises:
        SlipstreamError: The prompt leaves no room in the context, or an id is outside the vocabulary.
    """
    name, length = request.request_id, len(request.prompt_ids)
    given = {*request.prompt_ids, *itertools.chain.from_iterable(request.prefixes)}
    if not 0 < length < context:
        raise SlipstreamError(f"request {name!r}: {length} prompt tokens, 1 to {context - 1} fit")
    if not 0 <= min(given) <= max(given) < vocabulary:
        raise SlipstreamError(f"request {name!r}: an id is outside the vocabulary of {vocabulary}")


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; of a model with several parts, the text part's values count.

    Raises:
        UserError: There is none that can be read.
    """
    return text_part(read_architecture(folder))


def file_tensors(folder: Path) -> Shapes:
    """Names and shapes of the tensors that a version has, for an engine that takes them by the names of the files."""
    return {name: shape for name, shape in tensor_shapes(folder).items() if not name.endswith(LEFT_OUT)}


def check_weights(weights: ServedWeights, expected: Mapping[str, tuple[int, ...]], tied_head: bool) -> None:
    """Refuse a version before anything of it is applied: half of it would be a mixture.

    Args:
        tied_head: The output head is the embedding, so that it may come along or not.

    Raises:
        WeightsError: Names the first tensor that is missing, unknown, of another shape or no float.
    """
    optional = {"lm_head.weight"} if tied_head else set()
    for name in [*expected, *weights.tensors]:
        if name in optional:
            continue
        if name not in weights.tensors:
            raise WeightsError(f"weights lack tensor {name!r}")
        if name not in expected:
            raise WeightsError(f"tensor {name!r} is no part of this model")
        if weights.tensors[name].shape != expected[name]:
            found, wanted = list(weights.tensors[name].shape), list(expected[name])
            raise WeightsError(f"tensor {name!r} has shape {found} instead of {wanted}")
        # bfloat16 comes as uint16
        if (kind := weights.tensors[name].dtype).kind != "f" and kind.name != "uint16":
            raise WeightsError(f"tensor {name!r} has type {kind}, which is no float")
