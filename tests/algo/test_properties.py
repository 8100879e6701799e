"""What must not matter: the order of samples, the padding, and whether sequences were packed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algo.aggregation import unpack
from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import RECIPES, resolve
from slipstream.algo.settings.spec import Objective

recipes = st.sampled_from([name for name in RECIPES if name not in ("centred",)])
quick = settings(max_examples=40, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[GlobalBatch, Tensor]:
    """A batch of up to 9 samples in groups of any size, and the learner's logprobs."""
    samples = draw(st.integers(1, 9))
    lengths_B = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=samples, max_size=samples)))
    width = max(1, int(lengths_B.max()))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    reward = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, float("nan")])
    sampler_BT = -0.05 - 2 * torch.rand(samples, width, generator=random, dtype=torch.float64)
    batch = GlobalBatch(
        rewards_B=torch.tensor(draw(st.lists(reward, min_size=samples, max_size=samples)), dtype=torch.float64),
        groups_B=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples))),
        lengths_B=lengths_B,
        sampler_BT=sampler_BT,
        ages_BT=torch.randint(0, 4, (samples, width), generator=random),
        max_age=2,
        proximal_BT=sampler_BT + 0.3 * torch.rand(samples, width, generator=random, dtype=torch.float64),
        reference_BT=sampler_BT - 0.3 * torch.rand(samples, width, generator=random, dtype=torch.float64),
        components_BK=torch.rand(samples, 2, generator=random, dtype=torch.float64),
    )
    return batch, sampler_BT + 0.4 * torch.rand(samples, width, generator=random, dtype=torch.float64)


def outcome(
    spec: Objective, batch: GlobalBatch, logprobs_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Advantages, loss, gradient and metrics."""
    prepared = prepare(spec, batch)
    logprobs_BT = logprobs_BT.detach().requires_grad_()
    loss, tally = objective(spec, prepared, logprobs_BT)
    gradient_BT = torch.autograd.grad(loss, logprobs_BT)[0]
    return prepared.advantages_BT, loss.detach(), gradient_BT, finish_metrics(tally.merge(prepared.tally))


def reorder(batch: GlobalBatch, order_B: Tensor) -> GlobalBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: t[order_B] for name, t in tensors.items() if isinstance(t, Tensor)})


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@quick
@given(batches(), recipes, st.randoms(use_true_random=False))
def test_shuffling_permutes_advantages_and_changes_nothing_else(
    drawn: tuple[GlobalBatch, Tensor], recipe: str, random: object
) -> None:
    """Case 29."""
    (batch, logprobs_BT), spec = drawn, resolve(recipe, {"horizon": 5})
    order = list(range(len(logprobs_BT)))
    random.shuffle(order)  # type: ignore[attr-defined]
    order_B = torch.tensor(order)
    advantages_BT, loss, gradient_BT, values = outcome(spec, batch, logprobs_BT)
    shuffled = outcome(spec, reorder(batch, order_B), logprobs_BT[order_B])
    close(shuffled[0], advantages_BT[order_B])
    close(shuffled[1], loss)
    close(shuffled[2], gradient_BT[order_B])
    assert shuffled[3] == pytest.approx(values, rel=1e-8, abs=1e-9)


@quick
@given(batches(), recipes, st.integers(1, 4))
def test_padding_changes_nothing(drawn: tuple[GlobalBatch, Tensor], recipe: str, extra: int) -> None:
    (batch, logprobs_BT), spec = drawn, resolve(recipe, {"horizon": 5, "kl_beta": 0.1})

    def pad(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, extra), value=-7)

    padded = replace(
        batch,
        **{n: pad(getattr(batch, n)) for n in ("sampler_BT", "ages_BT", "proximal_BT", "reference_BT")},
    )
    plain, wide = outcome(spec, batch, logprobs_BT), outcome(spec, padded, pad(logprobs_BT))
    width = logprobs_BT.shape[1]
    close(wide[0][:, :width], plain[0])
    close(wide[1], plain[1])
    close(wide[2][:, :width], plain[2])
    assert not wide[2][:, width:].any()
    assert wide[3] == pytest.approx(plain[3], rel=1e-8, abs=1e-9)


@quick
@given(batches(), recipes)
def test_packed_equals_unpacked(drawn: tuple[GlobalBatch, Tensor], recipe: str) -> None:
    (batch, logprobs_BT), spec = drawn, resolve(recipe, {"horizon": 5})
    mask_BT = torch.arange(logprobs_BT.shape[1]) < batch.lengths_B[:, None]
    packed_N = logprobs_BT[mask_BT].requires_grad_()
    padded_BT = torch.nn.functional.pad(
        unpack(packed_N, batch.lengths_B), (0, logprobs_BT.shape[1] - int(batch.lengths_B.max()))
    )
    loss, _ = objective(spec, prepare(spec, batch), padded_BT)
    gradient_N = torch.autograd.grad(loss, packed_N)[0]
    _, plain_loss, plain_BT, _ = outcome(spec, batch, logprobs_BT)
    close(loss.detach(), plain_loss)
    close(gradient_N, plain_BT[mask_BT])


@quick
@given(batches(), recipes)
def test_samples_marked_without_gradient_have_none(drawn: tuple[GlobalBatch, Tensor], recipe: str) -> None:
    (batch, logprobs_BT), spec = drawn, resolve(recipe, {"horizon": 5})
    _, _, gradient_BT, _ = outcome(spec, batch, logprobs_BT)
    assert not gradient_BT[~prepare(spec, batch).gradient_B].any()
