"""Which layers carry adapters: the settings' targets against a model's layers. No torch, so that `up` can ask too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.models.architecture import read_architecture, vocabulary
from slipstream.models.tensors import tensor_shapes

_SHOWN = 12


def choose(layers: Iterable[str], targets: Iterable[str]) -> list[str]:
    """The layers that targets name in full or by their last parts; all of them where none are named.

    Raises:
        UserError: Targets that name no layer: these, and the names that there are.
    """
    known, wanted = list(layers), list(targets)
    unknown = [target for target in wanted if not any(_names(target, layer) for layer in known)]
    if unknown or not known:
        there = sorted({layer.rpartition(".")[2] for layer in known})
        shown = ", ".join(there[:_SHOWN]) + (", …" if len(there) > _SHOWN else "") if there else "none"
        raise UserError(
            f"learner.lora.targets: no linear layer {', '.join(map(repr, unknown))} that can carry an adapter",
            f"this model has {shown}",
        )
    return [layer for layer in known if not wanted or any(_names(target, layer) for target in wanted)]


def check_targets(folder: Path, lora: LoraSection) -> None:
    """Refuse targets that the files of a model folder do not hold, before the model is loaded, and a rank above them.

    Raises:
        UserError: As `choose`; or the rank is above what any of the targets can have.
    """
    if lora.rank is None:
        return
    words = vocabulary(read_architecture(folder))  # embeddings and the head carry none
    shapes = tensor_shapes(folder).items()
    sides = {n.removesuffix(".weight"): min(s) for n, s in shapes if len(s) == 2 and s[0] != words}
    if not sides and not lora.targets:  # whoever loads the model knows its layers better
        return
    widest = max(choose(sides, lora.targets), key=lambda name: sides[name])
    if lora.rank > sides[widest]:
        raise UserError(
            f"learner.lora.rank {lora.rank} is above the rank {sides[widest]} that a matrix of this model can have "
            f"({widest})",
            "lower it; 8 to 64 are usual",
        )


def _names(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
