"""Likeliest tokens from an engine to the loss: the learner reads the same distribution that the sampler saw."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.config.load import build
from slipstream.errors import ConfigError, UserError
from slipstream.learner.batch.collect import global_batch, head_ids
from slipstream.learner.batch.micro_batches import collate, completions_of
from slipstream.learner.batch.packing import pack
from slipstream.learner.batch.tree import grow
from slipstream.protocol.messages import Group, decode_group, encode_group
from slipstream.rollout.engines.base import GroupRequest, Sampling
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.engines.simulated import SimulatedEngine
from slipstream.rollout.engines.simulated_config import SimulatedConfig
from slipstream.rollout.episode import Episode

K, PROMPT, VOCAB = 3, (5, 6, 7), 40
TREE = {
    "run": {"steps": 5},
    "data": {"kind": "arithmetic"},
    "reward": {"functions": [{"use": "last_number"}]},
}
TOPK = [{"recipe": "dppo", "loss": "dppo_topk_tv"}, {"recipe": "centred"}]


def decode(token_ids):
    return " ".join(map(str, token_ids))


class Served:
    """The trainer's weights as an engine gets them."""

    version = 0

    def __init__(self, trainer):
        tensors = {name: value.numpy().copy() for name, value in trainer.tensors().items()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        self.tensors = tensors

    def release(self):
        pass


def engine_of(kind, folder):
    if kind == "simulated":
        config = SimulatedConfig(slots=4, mean_length=6, sigma=0.5, step_seconds=0.0, vocab_size=VOCAB)
        return SimulatedEngine(config, decode)
    return TransformersEngine(TransformersConfig(folder, slots=4, context=64), decode)


async def sampled(kind, folder, trainer, tickets=2):
    """Groups of four as they come from the wire, half of each rewarded."""
    engine = engine_of(kind, folder)
    await engine.start()
    try:
        await engine.swap(Served(trainer))
        return [await one(engine, ticket) for ticket in range(tickets)]
    finally:
        await engine.close()


async def one(engine, ticket):
    episode = Episode(4, head=K)
    seeds = tuple(range(10 * ticket, 10 * ticket + 4))
    request = GroupRequest(f"t{ticket}", PROMPT, seeds, Sampling(1.0, 8, (2,), top_logprobs=K))
    async for chunk in engine.generate(request):
        episode.add(chunk)
    header = Group(
        run="r",
        ticket=ticket,
        attempt=0,
        prompt_index=ticket,
        owner="o",
        admitted_version=0,
        samples=[],
        head=K,
    )
    arrays = episode.finish(header, PROMPT, SimpleNamespace(decode=decode))
    for index, sample in enumerate(header.samples):
        assert not sample.unscored
        sample.reward = float(index % 2)
    return decode_group(encode_group(header, arrays))


@pytest.mark.parametrize("objective", TOPK)
@pytest.mark.parametrize("kind", ["transformers", "simulated"])
async def test_an_objective_over_the_head_trains_on_what_an_engine_sampled(
    kind, objective, llama_folder, make_trainer
):
    trainer = make_trainer(objective, sampling={"top_logprobs": K})
    groups = await sampled(kind, llama_folder, trainer)
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    report = trainer.step(groups, 0)
    assert report.stepped
    assert any(not torch.equal(value, before[name]) for name, value in trainer.tensors().items())


async def test_the_learner_finds_the_samplers_own_logprobs_at_the_same_ids(llama_folder, make_trainer):
    trainer = make_trainer(TOPK[0], sampling={"top_logprobs": K})
    groups = await sampled("transformers", llama_folder, trainer)
    batch, ids_BTK = global_batch(groups, 0, None, heads=True), head_ids(groups)
    found = torch.full_like(batch.head_sampler_BTK, -torch.inf)
    own = torch.zeros_like(batch.sampler_BT)
    for (_, arrays), completions in zip(groups, completions_of(groups), strict=True):
        trees = grow(arrays.prompt_ids.astype(np.int64), completions, 512, trainer.policy.pair_cost)
        for rows in pack(trees, 512, trainer.policy.pair_cost, True):
            part = collate(rows)
            width = part.action_ST.shape[1]
            ids_STK = ids_BTK[part.samples_S, :width]
            with torch.no_grad():
                logprobs_ST, entropy_ST, head_STK = trainer.policy.with_heads(part, 1.0, ids_STK)
                plain_ST, plain_entropy_ST = trainer.policy.logprobs(part, 1.0)
            torch.testing.assert_close(logprobs_ST, plain_ST)
            torch.testing.assert_close(entropy_ST, plain_entropy_ST)
            for row, sample in enumerate(part.samples_S.tolist()):
                length = int(batch.lengths_B[sample])
                found[sample, :length] = head_STK[row, :length]
                own[sample, :length] = logprobs_ST[row, :length]
    torch.testing.assert_close(found, batch.head_sampler_BTK, atol=1e-4, rtol=0)
    torch.testing.assert_close(own, batch.sampler_BT, atol=1e-4, rtol=0)


async def test_the_learner_knows_where_the_sampled_token_is_one_of_the_likeliest(llama_folder, make_trainer):
    groups = await sampled("transformers", llama_folder, make_trainer(TOPK[0], sampling={"top_logprobs": K}))
    batch, ids_BTK = global_batch(groups, 0, None, heads=True), head_ids(groups)
    sampled_N = np.concatenate([arrays.token_ids for _, arrays in groups])
    token_BT = torch.arange(ids_BTK.shape[1]) < batch.lengths_B[:, None]
    expected_N = (ids_BTK[token_BT] == torch.from_numpy(sampled_N)[:, None]).any(1)
    assert torch.equal(batch.in_head_BT[token_BT], expected_N)
    assert not batch.in_head_BT[~token_BT].any()
    assert 0 < int(expected_N.sum()) < len(expected_N)


async def test_groups_without_likeliest_tokens_are_named_with_the_setting(make_trainer, random_groups):
    trainer = make_trainer(TOPK[0], sampling={"top_logprobs": K})
    with pytest.raises(UserError, match=r"ticket 0 came with 0 likeliest tokens.*sampling\.top_logprobs"):
        trainer.step(random_groups(), 0)


@pytest.mark.parametrize("objective", TOPK)
def test_the_setting_is_named_where_an_objective_needs_it(objective):
    with pytest.raises(ConfigError, match=r"top-k logprobs; set sampling\.top_logprobs"):
        build(TREE | {"objective": objective})
    build(TREE | {"objective": objective, "sampling": {"top_logprobs": K}})
