"""Low-rank adapters in the policy, by peft: the weights stay as they are, and A and B beside them are trained.

Adapters are float32 whatever the weights are: they are small, and their updates too. They are named as their weight
is: `<layer>.lora_A.weight` [rank, inputs] and `<layer>.lora_B.weight` [outputs, rank].
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.learner.model.lora_targets import choose

_LOG = logging.getLogger("slipstream.learner")

_ADAPTER = ".default.weight"  # peft's name for its only set of adapters


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a policy.

    Attributes:
        rank: Columns of B and rows of A.
        alpha: What makes the scale, with rank or, for rslora, its root.
        rslora: Which of the two.
        scale: The target weight W acts as W + scale * B A.
        layers: Names of the layers that carry one, in the model's order.
    """

    rank: int
    alpha: float
    rslora: bool
    scale: float
    layers: tuple[str, ...]


def add_adapters(module: nn.Module, lora: LoraSection) -> Adapters | None:
    """Put adapters into a model and freeze everything else; nothing happens where `lora.rank` is None.

    A is random by torch's seed and B is 0, so the model's outputs do not change.

    Raises:
        UserError: A target that the model has not, or that cannot carry an adapter.
    """
    if lora.rank is None:
        return None
    from peft import LoraConfig, inject_adapter_in_model

    layers = _layers(module, lora)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.numerator,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=layers,
        bias="none",
    )
    before = set(module.modules())
    inject_adapter_in_model(settings, module)
    for part in set(module.modules()) - before:
        part.train()  # for their dropout, whichever mode the model is in
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return Adapters(lora.rank, lora.numerator, lora.rslora, lora.scale, tuple(layers))


def _layers(module: nn.Module, lora: LoraSection) -> list[str]:
    """Names of the layers that shall carry adapters; says what else there is and carries none."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()  # type: ignore[operator]
    named = dict(module.named_modules())
    if turned := [name for name, part in named.items() if isinstance(part, Conv1D)]:
        raise UserError(
            f"learner.lora.rank {lora.rank}: {turned[0]} of {type(module).__name__} is a Conv1D, transformers' layer "
            "that keeps its weight as [inputs, outputs], and adapters go on linear layers",
            "train all weights (learner.lora.rank=null)",
        )
    linear = [name for name, part in named.items() if type(part) is nn.Linear and part is not head]
    chosen = choose(linear, lora.targets)
    if stacked := [name for name, value in module.named_parameters() if value.ndim == 3]:
        _LOG.info(
            "%d tensors that hold all experts of a layer carry no adapters, as %s", len(stacked), stacked[0]
        )
    return chosen


def plain_name(name: str) -> str:
    """The name that a parameter goes by outside: an adapter's, or that of the weight that peft has wrapped."""
    if name.endswith(_ADAPTER):
        return name.removesuffix(_ADAPTER) + ".weight"
    return name.replace(".base_layer.", ".")


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The adapters by name, detached but not copied."""
    named = module.named_parameters()
    return {plain_name(name): value.detach() for name, value in named if name.endswith(_ADAPTER)}


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout before the adapters while the block runs."""
    live = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.training]
    for part in live:
        part.eval()
    try:
        yield
    finally:
        for part in live:
            part.train()


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """The model as it is without its adapters while the block runs.

    Not by peft's `enable_adapters`, which also takes `requires_grad` away: FSDP copies that when it gathers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in module.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
