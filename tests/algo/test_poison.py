"""Extreme and broken inputs: the right value, a finite gradient, and no NaN that hides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from slipstream.algo.finite import NonFiniteError
from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import RECIPES, resolve

GAPS = [-200.0, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 88.8, 100.0, 200.0]
TERMS = {"kl_beta": 0.1, "entropy_coeff": 0.01, "horizon": 6}


def one_token(gap: float, advantage: float, **fields: object) -> tuple[float, float]:
    """Loss and d loss / d log pi of a single token with log pi - log mu = gap."""
    spec = resolve("grpo", {"advantage": "given", "clip_low": None, "clip_high": None, **fields})
    zero = torch.zeros(1, dtype=torch.long)
    batch = GlobalBatch(
        torch.zeros(1), zero, zero + 1, torch.full((1, 1), -gap), given_B=torch.tensor([advantage])
    )
    logprobs_BT = torch.zeros(1, 1, requires_grad=True)
    loss, tally = objective(spec, prepare(spec, batch), logprobs_BT)
    loss.backward()
    assert logprobs_BT.grad is not None
    assert all(math.isfinite(v) for v in finish_metrics(tally).values())
    return loss.item(), logprobs_BT.grad.item()


@pytest.mark.parametrize("gap", GAPS)
def test_weights_at_extreme_log_ratios(gap: float) -> None:
    """Case 54."""
    rho = math.exp(max(-20.0, min(20.0, gap)))
    assert one_token(gap, 1.0, proximal="none", correction="tis", cap_high=2.0) == pytest.approx(
        (-min(rho, 2.0),) * 2, rel=1e-5
    )
    inside = rho if 0.5 <= rho <= 5 else 0.0
    assert one_token(gap, 1.0, proximal="none", correction="mis", cap_low=0.5, cap_high=5.0) == pytest.approx(
        (-inside,) * 2
    )
    assert one_token(gap, 0.0, proximal="none", correction="raw") == (0.0, 0.0)
    # past the clamp the live ratio is a constant, so its gradient is 0
    live = -rho if abs(gap) <= 20 else 0.0
    assert one_token(gap, 1.0, correction="none", proximal="sampler", loss="importance") == pytest.approx(
        (-rho, live), rel=1e-5
    )
    clipped = {"correction": "none", "proximal": "sampler", "clip_low": 0.2, "clip_high": 0.2}
    flat = rho > 1.2
    assert one_token(gap, 1.0, **clipped) == pytest.approx((-min(rho, 1.2), 0.0 if flat else live), rel=1e-5)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("loss", ["cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "dro", "gspo", "no_ratio"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_every_loss_is_finite_at_extreme_log_ratios(gap: float, loss: str, advantage: float) -> None:
    value, slope = one_token(gap, advantage, correction="none", proximal="sampler", loss=loss)
    assert math.isfinite(value)
    assert math.isfinite(slope)
    if advantage == 0 and loss != "dro":
        assert (value, slope) == (0.0, 0.0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_masks_cover_cannot_matter(
    recipe: str, poison: float, make_batch: Callable[..., GlobalBatch]
) -> None:
    spec, batch = resolve(recipe, TERMS), make_batch()
    outcomes = []
    for value in (0.0, poison):
        mask_BT = torch.arange(6) < batch.lengths_B[:, None]

        def spoil(tensor: torch.Tensor, value: float = value, mask_BT: torch.Tensor = mask_BT) -> torch.Tensor:
            mask = mask_BT if tensor.dim() == 2 else mask_BT[..., None]
            return tensor.where(mask, value)

        names = ("sampler_BT", "proximal_BT", "reference_BT", "head_sampler_BTK")
        spoiled = replace(batch, **{name: spoil(getattr(batch, name)) for name in names})
        pi_BT = spoil(batch.sampler_BT + 0.1).requires_grad_()  # type: ignore[operator]
        entropy_BT = spoil(torch.ones(8, 6, dtype=torch.float64)).requires_grad_()
        head_BTK = spoil(batch.head_sampler_BTK + 0.1).requires_grad_()  # type: ignore[operator]
        prepared = prepare(spec, spoiled)
        loss, tally = objective(spec, prepared, pi_BT, entropy_BT, head_BTK)
        loss.backward()
        grads = [g if g is not None else torch.zeros(1) for g in (pi_BT.grad, entropy_BT.grad, head_BTK.grad)]
        outcomes.append((loss.detach(), *grads, finish_metrics(tally.merge(prepared.tally))))
    for clean, dirty in zip(*outcomes, strict=True):
        assert clean == dirty if isinstance(clean, dict) else torch.equal(clean, dirty)
    assert outcomes[1][0].isfinite()
    assert all(grad.isfinite().all() for grad in outcomes[1][1:4])


@pytest.mark.parametrize("name", ["sampler", "reference", "proximal", "learner"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_unmasked_poison_is_an_error_that_names_the_sample(
    name: str, poison: float, make_batch: Callable[..., GlobalBatch]
) -> None:
    batch = make_batch()
    tensors = {n: getattr(batch, f"{n}_BT").clone() for n in ("sampler", "reference", "proximal")}
    tensors["learner"] = tensors["sampler"].clone()
    tensors[name][5, 3] = poison
    fields = {f"{n}_BT": t for n, t in tensors.items() if n != "learner"}
    spec = resolve("decoupled_ppo")
    with pytest.raises(NonFiniteError, match=f"{name} logprob of sample 5, token 3 is "):
        objective(spec, prepare(spec, replace(batch, **fields)), tensors["learner"])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sampler", "sum of the sampler's top-k logprobs"),
        ("head", "sum of the learner's top-k logprobs"),
        ("entropy", "entropy"),
    ],
)
def test_unmasked_poison_in_head_or_entropy_names_the_sample(
    name: str, says: str, poison: float, make_batch: Callable[..., GlobalBatch]
) -> None:
    spec, batch = resolve("centred", {"entropy_coeff": 0.01}), make_batch()
    assert batch.sampler_BT is not None
    assert batch.head_sampler_BTK is not None
    tensors = {"sampler": batch.head_sampler_BTK.clone(), "head": batch.head_sampler_BTK.clone()}
    tensors["entropy"] = torch.ones_like(batch.sampler_BT)
    tensors[name][5, 3] = poison
    spoiled, pi_BT = replace(batch, head_sampler_BTK=tensors["sampler"]), batch.sampler_BT
    with pytest.raises(NonFiniteError, match=f"^{says} of sample 5, token 3 is "):
        objective(spec, prepare(spec, spoiled), pi_BT, tensors["entropy"], tensors["head"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_batch_of_nothing_gives_loss_zero_and_no_step(recipe: str) -> None:
    """Case 46."""
    spec, none_BT = resolve(recipe, {"horizon": 4}), torch.zeros(0, 0)
    ids_B = torch.zeros(0, dtype=torch.long)
    batch = GlobalBatch(
        torch.zeros(0), ids_B, ids_B, none_BT, ages_BT=none_BT.long(), proximal_BT=none_BT,
        components_BK=torch.zeros(0, 2), head_sampler_BTK=torch.zeros(0, 0, 2),
    )  # fmt: skip
    prepared = prepare(spec, batch)
    loss, tally = objective(spec, prepared, none_BT.requires_grad_(), head_BTK=torch.zeros(0, 0, 2))
    assert loss == 0
    assert not prepared.trainable
    assert all(math.isfinite(v) for v in finish_metrics(tally.merge(prepared.tally)).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_precision_inputs_give_float32_losses_and_finite_gradients(
    recipe: str, dtype: torch.dtype, make_batch: Callable[..., GlobalBatch]
) -> None:
    """Case 55."""
    spec, batch = resolve(recipe, TERMS), make_batch(dtype=dtype)
    assert batch.sampler_BT is not None
    parameter = torch.nn.Parameter(torch.zeros(8, 6, dtype=dtype))
    pi_BT = batch.sampler_BT + parameter
    loss, _ = objective(spec, prepare(spec, batch), pi_BT, -pi_BT, batch.head_sampler_BTK)
    assert loss.dtype == torch.float32
    loss.backward()
    torch.optim.AdamW([parameter], eps=1e-4).step()  # the usual 1e-8 is 0 in float16
    assert parameter.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_token_and_empty_and_lonely_samples(recipe: str) -> None:
    spec = resolve(recipe, {"horizon": 4})
    batch = GlobalBatch(
        rewards_B=torch.tensor([1.0, 0.0, 1.0, 0.3, 0.3]),
        groups_B=torch.tensor([0, 0, 1, 2, 2]),
        lengths_B=torch.tensor([1, 0, 2, 1, 2]),
        sampler_BT=torch.full((5, 2), -1.0),
        proximal_BT=torch.full((5, 2), -1.0),
        ages_BT=torch.zeros(5, 2, dtype=torch.long),
        components_BK=torch.tensor([[1.0, 0], [0, 0], [1, 1], [0.3, 0], [0.3, 0]]),
        head_sampler_BTK=torch.full((5, 2, 2), math.log(0.3)),
    )
    prepared = prepare(spec, batch)
    logprobs_BT = torch.full((5, 2), -1.0, requires_grad=True)
    loss, tally = objective(spec, prepared, logprobs_BT, head_BTK=torch.full((5, 2, 2), math.log(0.3)))
    loss.backward()
    assert loss.isfinite()
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.isfinite().all()
    assert all(math.isfinite(v) for v in finish_metrics(tally.merge(prepared.tally)).values())
    if spec.loss != "dro" and not recipe.startswith("reinforce"):
        assert not prepared.gradient_B[2:].any()
        assert not logprobs_BT.grad[1:].any()
