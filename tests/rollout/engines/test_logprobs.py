"""What engines that compute a model say about their tokens, against fresh transformers forward passes."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError, WeightsError

TOLERANCE = 1e-3
SEEDS = tuple(range(6))

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _worst(models: Any, prompt: tuple[int, ...], sample: Any, temperature: float = 1.0) -> float:
    """Largest difference between reported logprobs and a fresh pass of each token's stamped version."""
    worst = 0.0
    for version in set(sample.versions):
        fresh = models.logprobs(version, prompt, sample.token_ids, temperature)
        pairs = zip(fresh, sample.logprobs, sample.versions, strict=True)
        worst = max([worst, *(abs(a - b) for a, b, stamp in pairs if stamp == version)])
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_a_fresh_forward(model_bench: Any, temperature: float) -> None:
    """Case 41: the temperature is on both sides."""
    prompts = [(5, 6, 7, 8), (1,), tuple(range(20))]
    groups = await asyncio.gather(
        *(
            model_bench.collect(model_bench.request(prompt=prompt, tokens=30, temperature=temperature))
            for prompt in prompts
        )
    )
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            assert len(sample.token_ids) == 30
            assert _worst(model_bench.models, prompt, sample, temperature) < TOLERANCE


async def test_greedy_takes_the_likeliest_token(model_bench: Any) -> None:
    prompt = (3, 4)
    (sample,) = await model_bench.collect(model_bench.request(seeds=(1,), prompt=prompt, temperature=0.0))
    logits = model_bench.models.model(1)(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, 1:-1]
    assert sample.token_ids == logits.argmax(-1).tolist()
    assert _worst(model_bench.models, prompt, sample) < TOLERANCE


async def test_logprobs_before_across_and_after_a_swap(model_bench: Any) -> None:
    """Cases 68 and 71: each token has the logprob of its stamped version.

    With a recomputed cache that is a fresh pass of the version; with a kept one, the version's weights over the
    keys and values that older weights made. A sample that starts after the swap is all new either way.
    """
    prompt, models = (5, 6, 7), model_bench.models
    for sample in await model_bench.collect_across_a_swap(
        model_bench.request(seeds=SEEDS, prompt=prompt, tokens=30)
    ):
        assert set(sample.versions) == {1, 2}
        if model_bench.keeps_cache:
            expected = np.array(_logprobs_with_kept_cache(models, prompt, sample))
            assert np.abs(expected - np.array(sample.logprobs)).max() < TOLERANCE
            assert _worst(models, prompt, sample) > TOLERANCE  # the test can tell the two apart
        else:
            assert _worst(models, prompt, sample) < TOLERANCE
    fresh = await model_bench.collect(model_bench.request(prompt=prompt))
    assert all(_worst(models, prompt, sample) < TOLERANCE for sample in fresh)


@torch.no_grad()
def _logprobs_with_kept_cache(models: Any, prompt: tuple[int, ...], sample: Any) -> list[float]:
    key = "cache" if "cache" in inspect.signature(models.model(1).forward).parameters else "past_key_values"
    first = models.model(1)(torch.tensor([prompt]), use_cache=True)
    logits, cache, found = first.logits[0, -1], getattr(first, key), []
    for index, token in enumerate(sample.token_ids):
        found.append(torch.log_softmax(logits, -1)[token].item())
        version = sample.versions[min(index + 1, len(sample.versions) - 1)]
        fed = torch.tensor([[token]])
        logits = models.model(version)(fed, use_cache=True, **{key: cache}).logits[0, -1]
    return found


async def test_late_samples_of_a_group_do_not_reuse_a_prompt_of_older_weights(model_bench: Any) -> None:
    """Case 71: 12 samples in 6 slots; those that start after the swap see the new weights only."""
    prompt = (9, 8, 7, 6)
    request = model_bench.request(seeds=tuple(range(12)), prompt=prompt, tokens=10)
    made = await model_bench.collect_across_a_swap(request)
    late = [sample for sample in made if set(sample.versions) == {2}]
    assert len(late) == 6
    assert all(_worst(model_bench.models, prompt, sample) < TOLERANCE for sample in late)


async def test_late_samples_share_the_prompt_of_the_same_weights(model_bench: Any) -> None:
    prompt = (9, 8, 7, 6)
    made = await model_bench.collect(model_bench.request(seeds=tuple(range(14)), prompt=prompt, stop=(1, 2, 3)))
    assert all(_worst(model_bench.models, prompt, sample) < TOLERANCE for sample in made)


async def test_context_limits_the_length(model_bench: Any) -> None:
    """Case 45."""
    (sample,) = await model_bench.collect(model_bench.request(seeds=(1,), prompt=(4,) * 60, tokens=30))
    assert (len(sample.token_ids), sample.finish) == (4, "length")
    with pytest.raises(SlipstreamError, match="64 prompt tokens, 1 to 63 fit"):
        await model_bench.collect(model_bench.request(prompt=(4,) * 64))
    with pytest.raises(SlipstreamError, match="vocabulary of 32"):
        await model_bench.collect(model_bench.request(prompt=(4, 32)))


async def test_sample_without_a_finite_logprob_is_refused(model_bench: Any) -> None:
    """Cases 39 and 40: neither padded nor trained on; the engine goes on with sound weights."""
    broken = model_bench.weights(2)
    arrays = {name: array.copy() for name, array in broken.tensors.items()}
    for array in arrays.values():
        array.fill(np.nan)
    broken.tensors = arrays
    await model_bench.engine.swap(broken)
    made = await model_bench.collect(model_bench.request())
    assert [(sample.token_ids, sample.finish) for sample in made] == [([], "abort")] * 3
    await model_bench.engine.swap(model_bench.weights(3))
    made = await asyncio.gather(
        *(model_bench.collect(model_bench.request(prompt=(4,) * length, tokens=20)) for length in (1, 9))
    )
    assert {sample.finish for group in made for sample in group} == {"length"}


async def test_weights_that_do_not_fit_are_refused_and_the_old_stay(model_bench: Any) -> None:
    """Case 72."""
    before = await model_bench.collect(model_bench.request())
    lacking, misshapen = model_bench.weights(2), model_bench.weights(3)
    name = "model.layers.1.mlp.up_proj.weight"
    lacking.tensors = {key: array for key, array in lacking.tensors.items() if key != name}
    misshapen.tensors = {**misshapen.tensors, name: np.zeros((3, 3), np.float32)}
    with pytest.raises(WeightsError, match=rf"lack tensor '{name}'"):
        await model_bench.engine.swap(lacking)
    with pytest.raises(WeightsError, match=r"shape \[3, 3\] instead of \[48, 32\]"):
        await model_bench.engine.swap(misshapen)
    assert (lacking.releases, misshapen.releases) == (1, 1)
    assert model_bench.engine.version == 1
    after = await model_bench.collect(model_bench.request())
    assert [sample.logprobs for sample in after] == [sample.logprobs for sample in before]


async def test_bfloat16_on_the_wire_is_computed_in_float32(model_bench: Any) -> None:
    sent = model_bench.weights(2)
    rounded = {name: torch.from_numpy(array.copy()).bfloat16() for name, array in sent.tensors.items()}
    sent.tensors = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in rounded.items()}
    model_bench.models.model(2).load_state_dict({name: tensor.float() for name, tensor in rounded.items()})
    await model_bench.engine.swap(sent)
    (sample,) = await model_bench.collect(model_bench.request(seeds=(5,), prompt=(1, 2)))
    assert _worst(model_bench.models, (1, 2), sample) < TOLERANCE
