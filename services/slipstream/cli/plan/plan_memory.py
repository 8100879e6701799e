"""What a learner's rank and a replica hold in memory, from the config and the model's own sizes; an estimate."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.models.tensors import tensor_shapes

BYTES = {"float32": 4, "bfloat16": 2}
VERSIONS = 2  # of the weights in shared memory: the one being served, and the one that comes
LOGITS_BYTES = (256 + 64) << 20  # most that the fused head keeps, and a chunk in the making (algo/logprobs.py)


@dataclass(frozen=True)
class Sizes:
    """A model's sizes: parameters, layers, hidden width, width of the feed-forward part, of keys and values together,
    vocabulary, and the parameters of adapters of rank 1 on every linear layer."""

    parameters: int
    layers: int
    hidden: int
    feed_forward: int
    keys_values: int
    vocabulary: int
    per_rank: int

    @staticmethod
    def of(folder: Path) -> Sizes | None:
        """From a model's folder, without reading its weights; None where its config.json names them otherwise, as
        GPT-2's does, or cannot be read.

        Raises:
            UserError: A weights file that cannot be read.
        """
        shapes = tensor_shapes(folder)
        matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name]
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            width = int(config.get("head_dim") or hidden // heads)
            return Sizes(
                parameters=sum(math.prod(shape) for shape in shapes.values()),
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                feed_forward=int(config.get("intermediate_size") or 4 * hidden),
                keys_values=2 * width * int(config.get("num_key_value_heads") or heads),
                vocabulary=int(config["vocab_size"]),
                per_rank=sum(sum(shape) for shape in matrices),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OSError):
            return None


def version_bytes(config: Config, model: Sizes) -> int:
    """Bytes of one version as it is published: adapters alone, where only they are trained."""
    return _trained(config, model) * BYTES[config.learner.precision.transfer or config.model.dtype]


def _trained(config: Config, model: Sizes) -> int:
    rank = config.learner.lora.rank
    return model.parameters if rank is None else rank * model.per_rank


def learner_memory(config: Config, model: Sizes) -> dict[str, int]:
    """Bytes of one rank by what holds them; `published` lies in shared memory of rank 0's host."""
    learner = config.learner
    ranks = max(1, (learner.parallel.ranks or 1) // learner.parallel.replicate)
    each = BYTES[learner.precision.master or config.model.dtype]
    trained = _trained(config, model)
    compute = BYTES[learner.precision.param or learner.precision.master or config.model.dtype]
    tokens = learner.micro_batch_tokens
    logits = min(tokens * model.vocabulary * 4, LOGITS_BYTES)
    reference = model.parameters * each // ranks if _second_model(config) else 0
    return {
        "weights": model.parameters * each // ranks,
        "gradients": trained * each // ranks,
        "moments": 2 * trained * each // ranks,
        **({"reference": reference} if reference else {}),
        "activations": tokens * activations(model, learner.activations) * compute + logits,
        "published": VERSIONS * version_bytes(config, model),
        "checkpoint": 3 * trained * each // ranks,
    }


def _second_model(config: Config) -> bool:
    """Whether a reference stays beside the policy: not where the policy without its adapters is the reference."""
    reference, lora = config.learner.reference, config.learner.lora.rank is not None
    inside = lora and reference.source == "start" and config.learner.start_from is None
    return reference.source is not None and not reference.offload and not inside


def activations(model: Sizes, kept: str) -> int:
    """Numbers that a pass keeps for its backward, a token.

    A block keeps hidden states before and after both norms and in the residuals (6), queries twice and the
    attention's output; keys and values, twice for their rotation; four numbers a feed-forward unit (gate, up,
    activated, product). Selectively: the results of matrix products and attention alone, and its input. Full: its
    input, and all of one block at a time.
    """
    whole = 9 * model.hidden + 2 * model.keys_values + 4 * model.feed_forward
    if kept == "full":
        return model.layers * model.hidden + whole
    if kept == "selective":
        return model.layers * (5 * model.hidden + model.keys_values + 2 * model.feed_forward) + whole
    return model.layers * whole


def replica_memory(config: Config, model: Sizes, prompt_tokens: int) -> dict[str, int]:
    """Bytes of one replica by what holds them: the version that it maps, the next one, and its cache when full."""
    each = BYTES[config.learner.precision.transfer or config.model.dtype]
    length = config.model.context_length or prompt_tokens + config.sampling.max_new_tokens
    tokens = config.rollout.engine.max_sequences * min(length, prompt_tokens + config.sampling.max_new_tokens)
    return {
        "weights": VERSIONS * model.parameters * each,
        "cache": tokens * model.layers * model.keys_values * each,
    }
