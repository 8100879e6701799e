"""How many weights change their bits in one step, and how large the delta is: SmolLM2-135M, AdamW, real gradients.

    python -m benchmarks.weights_delta [--steps N]

Two settings: float32 on the wire at a learning rate of 2e-5, and bfloat16 on the wire at 1e-6 with float32 master
weights, as RL uses them. The loss is the language model's own on the model card's kind of text; the gradient's size
hardly matters to AdamW, the learning rate and the wire's dtype do. Aim: below 5 % of the dense bytes for bfloat16.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch

from benchmarks.result import tell
from slipstream.models.resolve import resolve
from slipstream.weights.bytes.delta import encode
from slipstream.weights.bytes.torch_io import gather
from slipstream.weights.manifest import Layout, layout

TEXT = (
    "The sum of 17 and 25 is 42, because 17 plus 20 is 37 and 37 plus 5 is 42. To add two numbers, begin with the "
    "ones, carry what is over nine, and go on with the tens. "
)
CASES = [("float32", 2e-5), ("bfloat16", 1e-6)]
WARM_UP = 2  # AdamW's first steps all have the full size of the learning rate


def flat(model: Any, wire: torch.dtype) -> tuple[np.ndarray, Layout]:
    """The model's bytes as they travel."""
    gathered = gather({name: value.detach() for name, value in model.named_parameters()}, wire)
    plan = layout(gathered.tensors, gathered.tied)
    data = np.zeros(plan.total_bytes, np.uint8)
    for spec in plan.tensors:
        place = data[spec.offset : spec.offset + spec.nbytes]
        gathered.tensors[spec.name].copy(place, 0, math.prod(spec.shape))
    return data, plan


def measure(source: str, wire: str, rate: float, steps: int) -> dict[str, float]:
    """Medians over the steps after the warm-up: share of elements that changed, and delta bytes over dense bytes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokens_1L = AutoTokenizer.from_pretrained(folder, local_files_only=True)(
        TEXT * 2, return_tensors="pt"
    ).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    before, plan = flat(model, getattr(torch, wire))
    densities, shares = [], []
    for step in range(WARM_UP + steps):
        window_1L = tokens_1L[:, 7 * step : 7 * step + 64]
        model(input_ids=window_1L, labels=window_1L).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after, _ = flat(model, getattr(torch, wire))
        encoded = encode(before, after, plan)
        densities.append(encoded.density)
        shares.append(1.0 if encoded.blob is None else len(encoded.blob) / plan.total_bytes)
        before = after
    return {
        "density": float(np.median(densities[WARM_UP:])),
        "of_dense_bytes": float(np.median(shares[WARM_UP:])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    figures = {}
    for wire, rate in CASES:
        found = measure(options.model, wire, rate, options.steps)
        figures |= {f"{wire}_{name}": round(value, 5) for name, value in found.items()}
        print(
            f"{wire:9} lr {rate:g}: {found['density']:.2%} of the elements change per step, "
            f"the delta has {found['of_dense_bytes']:.2%} of the dense bytes"
        )
    tell("weights_delta", figures, {"bfloat16_of_dense_bytes": "< 0.05"})


if __name__ == "__main__":
    main()
