"""Adapters travel alone: a replica merges them into the base of its own folder, and says what the learner says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import BaseMismatch, WeightsError
from slipstream.learner.lora_publishing import adapter_of
from slipstream.learner.model.model import Policy
from slipstream.learner.publish.outlet import canaries
from slipstream.models.resolve import resolve
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.engines.handover import hand_over
from slipstream.rollout.follower import deviation
from slipstream.weights.bytes.torch_io import gather
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import decode_manifest, encode_manifest, layout
from slipstream.weights.merging import MergingSubscriber


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def learner(folder, dtype="float32", seed=1, **lora):
    """A policy whose adapters are no longer nothing."""
    policy = Policy(folder, ModelSection(dtype=dtype), "cpu", LoraSection(rank=4, **lora))
    generator = torch.Generator().manual_seed(seed)
    for name, value in policy.parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1, generator=generator)
    return policy


class Link:
    """A learner's publisher and a replica's subscriber over a folder."""

    def __init__(self, policy, directory, folder=None):
        self.policy, self.sources = policy, gather(policy.tensors()).tensors
        self.publisher = ShmPublisher("r", 1, layout(self.sources), directory=directory, threads=1)
        self.subscriber = MergingSubscriber(ShmSubscriber(directory=directory), folder or policy.folder)

    def publish(self, version=1, dtype=torch.float32):
        manifest = self.publisher.publish(version, gather(self.policy.tensors()).tensors)
        manifest = msgspec.structs.replace(manifest, adapter=adapter_of(self.policy, dtype))
        return decode_manifest(encode_manifest(manifest))

    def close(self):
        self.subscriber.close()
        self.publisher.close()


@pytest.fixture
def link(tmp_path):
    links = []

    def make(policy, folder=None):
        links.append(Link(policy, tmp_path, folder))
        return links[-1]

    yield make
    for each in links:
        each.close()


@pytest.mark.parametrize("more", [{}, {"rslora": True}, {"targets": ["q_proj", "down_proj"]}])
def test_the_replica_merges_what_peft_merges(link, more):
    policy = learner(resolve("tiny-sorter"), **more)
    over = link(policy)
    manifest = over.publish(version=7)  # the first that this replica sees
    weights = over.subscriber.fetch(manifest)
    small = sum(value.nbytes for value in policy.tensors().values())
    assert manifest.layout.total_bytes < 1.1 * small + 64 * len(policy.tensors())
    for part in policy.module.modules():
        if hasattr(part, "lora_A"):
            part.merge()
    expected = policy.base_tensors()
    assert weights.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(weights.tensors[name] - value.numpy()).max() <= 1e-6, name
    changed = {f"{layer}.weight" for layer in policy.adapters.layers}
    on_disk = Policy(policy.folder, ModelSection(), "cpu").tensors()
    assert {name for name in on_disk if not np.array_equal(weights.tensors[name], on_disk[name])} == changed
    weights.release()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.1)])
async def test_an_engine_says_what_the_learner_says(link, dtype, bound):
    policy = learner(resolve("tiny-sorter"), dtype)
    over = link(policy)
    engine = TransformersEngine(TransformersConfig(folder=policy.folder, slots=4, context=64))
    await engine.start()
    try:
        await engine.swap(over.subscriber.fetch(over.publish(1, getattr(torch, dtype))))
        heard = canaries(policy)
        assert await deviation(engine, 1, heard, 1) < bound
        plain = canaries(Policy(policy.folder, ModelSection(), "cpu"))
        assert await deviation(engine, 1, plain, 2) > 0.1
    finally:
        await engine.close()


def test_a_base_of_other_weights_is_refused_with_both_digests(link):
    over = link(learner(resolve("tiny-sorter")), folder=resolve("tiny-sorter:1"))
    manifest = over.publish()
    with pytest.raises(BaseMismatch, match=manifest.adapter.base_digest):
        over.subscriber.fetch(manifest)


def test_another_process_is_handed_the_whole_version(link):
    """Not what was published, which lies in shared memory under a name as well."""
    policy = learner(resolve("tiny-sorter"))
    over = link(policy)
    weights = over.subscriber.fetch(over.publish())
    with hand_over(weights) as handover:
        assert {spec.name for spec in handover.layout.tensors} == policy.base_tensors().keys()
    weights.release()


def test_the_base_is_read_once_and_anew_after_a_doubt(link, monkeypatch):
    from slipstream.weights import merging

    read = []
    monkeypatch.setattr(
        merging, "read_base", lambda *given, real=merging.read_base: read.append(1) or real(*given)
    )
    over = link(learner(resolve("tiny-sorter")))
    for version in (1, 2):
        over.subscriber.fetch(over.publish(version)).release()
    assert len(read) == 1
    over.subscriber.forget()
    over.subscriber.fetch(over.publish(3)).release()
    assert len(read) == 2


def test_a_released_versions_memory_holds_the_next_one_and_never_one_that_is_read(link):
    policy = learner(resolve("tiny-sorter"))
    over, name = link(policy), f"{policy.adapters.layers[0]}.weight"
    first, second = (over.subscriber.fetch(over.publish(version)) for version in (1, 2))
    kept, place = second.tensors[name].copy(), first.tensors[name].ctypes.data
    assert second.tensors[name].ctypes.data != place
    for each in (first, first):
        each.release()
    with torch.no_grad():
        for value in policy.parameters().values():
            value *= 2
    third, fourth = (over.subscriber.fetch(over.publish(version)) for version in (3, 4))
    assert third.tensors[name].ctypes.data == place
    assert fourth.tensors[name].ctypes.data not in (place, second.tensors[name].ctypes.data)
    assert np.array_equal(second.tensors[name], kept)
    assert not np.array_equal(third.tensors[name], kept)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 3}, "no adapter of rank 3"),
        ({"rank": 0}, "rank 0"),
        ({"scale": float("inf")}, "scale inf"),
        ({"dtype": "float7"}, "float7"),
        ({"layers": ["nowhere"]}, "nowhere"),
        ({"layers": []}, "belongs to no adapter"),
        ({"base": []}, "no weight in the base"),
    ],
)
def test_an_adapter_that_does_not_fit_its_version_is_refused(link, change, named):
    manifest = link(learner(resolve("tiny-sorter"))).publish()
    adapter = msgspec.structs.replace(manifest.adapter, **change)
    with pytest.raises(WeightsError, match=named):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, adapter=adapter)))
