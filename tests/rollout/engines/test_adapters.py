"""A version that is adapters on a base, on every engine that computes a model: sampled from as one that is whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slipstream.models.tensors import content_digest, read_tensors
from slipstream.weights.bytes.torch_io import gather
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import Adapter, layout
from slipstream.weights.merging import MergingSubscriber

RANK, SCALE = 2, 0.5


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(9), {}
    head = model.get_output_embeddings()
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and part is not head:
            outputs, inputs = part.weight.shape
            found[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
            found[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.2
    return found


def described(folder: Path, model: Any, adapters: dict[str, torch.Tensor]) -> Adapter:
    base = [name for name, _ in model.named_parameters()]
    layers = [name.removesuffix(".lora_A.weight") for name in adapters if "lora_A" in name]
    digest = content_digest(read_tensors(folder, base))
    return Adapter(rank=RANK, scale=SCALE, layers=layers, base=base, base_digest=digest, dtype="float32")


@torch.no_grad()
def merged_by_hand(model: Any, adapters: dict[str, torch.Tensor]) -> Any:
    model = copy.deepcopy(model)
    for name, part in model.named_modules():
        if f"{name}.lora_A.weight" in adapters:
            part.weight += SCALE * adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
    return model


@pytest.mark.asyncio(loop_scope="session")
async def test_logprobs_are_those_of_the_merged_model(model_bench, tmp_path):
    model = model_bench.models.model(1)
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    adapters = adapters_of(model)
    sources = gather(adapters).tensors
    publisher = ShmPublisher("adapters", 1, layout(sources), directory=tmp_path, threads=1)
    subscriber = MergingSubscriber(ShmSubscriber(directory=tmp_path), folder)
    manifest = publisher.publish(2, sources)
    manifest = msgspec.structs.replace(manifest, adapter=described(folder, model, adapters))
    try:
        await model_bench.engine.swap(subscriber.fetch(manifest))
        request = model_bench.request()
        samples = await model_bench.collect(request)
        model_bench.models.built[2] = merged_by_hand(model, adapters)
        for sample in samples:
            assert set(sample.versions) == {2}
            fresh = model_bench.models.logprobs(2, request.prompt_ids, sample.token_ids, 1.0)
            assert sample.logprobs == pytest.approx(fresh, abs=1e-3)
            plain = model_bench.models.logprobs(1, request.prompt_ids, sample.token_ids, 1.0)
            assert max(abs(a - b) for a, b in zip(fresh, plain, strict=True)) > 0.05
        await model_bench.engine.swap(model_bench.weights(3))  # lets go of the merged ones
    finally:
        subscriber.close()
        publisher.close()
