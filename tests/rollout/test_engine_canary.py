"""The learner and an engine with the same weights say the same; with one tensor wrong they do not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slipstream.config.sections.data_config import ModelSection
from slipstream.learner.model.model import Policy
from slipstream.learner.publish.outlet import canaries, fixed_prompts
from slipstream.models.resolve import resolve
from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.follower import deviation


class Weights:
    def __init__(self, version, tensors, tied):
        self.version = version
        self.tensors = {name: tensor.clone().numpy() for name, tensor in tensors.items()}
        if tied:
            self.tensors["lm_head.weight"] = self.tensors["model.embed_tokens.weight"]

    def release(self):
        pass


async def test_an_engine_deviates_only_when_its_weights_are_others():
    torch.set_num_threads(1)
    folder = resolve("tiny-sorter")
    policy = Policy(folder, ModelSection(), "cpu")
    heard = canaries(policy)
    engine = TransformersEngine(TransformersConfig(folder=folder, slots=4, context=64))
    await engine.start()
    try:
        await engine.swap(Weights(1, policy.tensors(), policy.tied))
        assert await deviation(engine, 1, heard, 1) < 1e-4
        spoilt = {name: tensor.clone() for name, tensor in policy.tensors().items()}
        name = next(name for name in spoilt if "layers.0" in name and spoilt[name].dim() == 2)
        spoilt[name] *= -1
        await engine.swap(Weights(2, spoilt, policy.tied))
        assert await deviation(engine, 2, heard, 2) > 0.01
    finally:
        await engine.close()


def test_prompts_lie_in_any_vocabulary():
    assert all(0 <= token < 5 for prompt in fixed_prompts(5) for token in prompt)


@pytest.mark.parametrize(
    ("logprob", "version", "found"), [(math.nan, 1, math.inf), (-3.0, 1, 2.0), (-3.0, 2, 0.0)]
)
async def test_what_is_no_number_deviates_and_what_another_version_says_does_not_count(logprob, version, found):
    async def says(request):
        yield Chunk(0, (1,), (logprob,), version, "length")

    heard = [SimpleNamespace(prompt_ids=[1], token_ids=[1], logprobs=[-1.0])]
    assert await deviation(SimpleNamespace(generate=says), 1, heard, 1) == found


async def test_an_engine_that_gives_nothing_deviates():
    async def nothing(request):
        return
        yield

    heard = [SimpleNamespace(prompt_ids=[1], token_ids=[1], logprobs=[-1.0])]
    assert await deviation(SimpleNamespace(generate=nothing), 1, heard, 1) == math.inf
    assert await deviation(None, 1, [], 1) == 0.0
