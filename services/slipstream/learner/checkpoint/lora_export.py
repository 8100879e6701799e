"""Exports of a checkpoint that holds adapters: merged into whole weights, or as a folder that peft loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import UserError, install
from slipstream.learner.checkpoint.export import write_files
from slipstream.learner.model.tensor_shards import Saved
from slipstream.models.joined import read_model_tensors
from slipstream.models.tensors import content_digest, tensor_shapes
from slipstream.run.privacy import open_as_others
from slipstream.weights.merging import merge_all

_PEFT_PREFIX = "base_model.model."


def write_merged(checkpoint: Path, adapter: dict[str, Any], model: Path, dtype: str, target: Path) -> None:
    """Write the whole weights into a folder: exactly what the replicas of the run served.

    Args:
        checkpoint: Where the adapters lie. adapter: Its `adapter.json`.
        model: The base's folder. dtype: What the weights of the run travel as: the base is used, and the result
            written, in it.
        target: An existing folder.

    Raises:
        UserError: The model's folder is not the base that the adapters were trained on.
    """
    base = read_model_tensors(model, adapter["base"]["tensors"])
    if (digest := content_digest(base)) != adapter["base"]["digest"]:
        raise UserError(
            f"model.source: {model} has content {digest}, but the adapters in {checkpoint} belong to "
            f"{adapter['base']['digest']}",
            "bring back the weights that they were trained on",
        )
    parts, kind = adapter_weights(checkpoint), getattr(torch, dtype)
    adapted = {f"{layer}.weight": layer for layer in adapter["layers"]}

    def whole(name: str) -> Tensor:
        value = base[name].to(kind) if base[name].is_floating_point() else base[name]
        if name not in adapted:
            return value
        return merge_all({name: value}, parts, [adapted[name]], adapter["scale"])[name]

    sizes = {n: v.numel() * (kind if v.is_floating_point() else v.dtype).itemsize for n, v in base.items()}
    write_files(target, sizes, whole)


def write_peft(checkpoint: Path, adapter: dict[str, Any], model: Path, target: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into an existing folder, as peft has them.

    Raises:
        UserError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("--adapter: peft is not installed here", install("lora"))
    from peft import LoraConfig, TaskType

    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        use_rslora=adapter["rslora"],
        target_modules=_shortest(adapter["layers"], model),
        base_model_name_or_path=str(model),
        inference_mode=True,
    )
    settings.save_pretrained(str(target))
    named = {f"{_PEFT_PREFIX}{name}": value for name, value in adapter_weights(checkpoint).items()}
    path = target / "adapter_model.safetensors"
    save_file(named, path, {"format": "pt"})
    open_as_others(path)


def adapter_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The adapters of a checkpoint by name, whole, whichever ranks wrote them."""
    saved = Saved(checkpoint, "model")
    return {name: saved.whole(name) for name in saved.shapes}


def _shortest(layers: list[str], model: Path) -> list[str]:
    """Last parts of the layers' names where these select exactly them in the model, else their whole names."""
    parts = {layer.rpartition(".")[2] for layer in layers}
    shapes = tensor_shapes(model)
    linear = {name.removesuffix(".weight") for name in shapes if name.endswith(".weight")}
    selected = {name for name in linear if name.rpartition(".")[2] in parts}
    return sorted(parts) if selected == set(layers) else list(layers)
