"""Expectations summed exactly over every sequence of three tokens from a vocabulary of five."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import resolve

V = 5


class World:
    """All sequences of a length under tabular policies: one row of logits per prefix."""

    def __init__(self, length: int) -> None:
        random = torch.Generator().manual_seed(length)
        self.sequences = torch.tensor(list(itertools.product(range(V), repeat=length)))
        prefixes = {
            p: i for i, p in enumerate(p for n in range(length) for p in itertools.product(range(V), repeat=n))
        }
        rows = [[prefixes[tuple(s[:t])] for t in range(length)] for s in self.sequences.tolist()]
        self.rows_BT = torch.tensor(rows)
        shape = len(prefixes), V
        self.learner = torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()
        self.sampler = self.learner.detach() + 0.8 * torch.randn(*shape, generator=random, dtype=torch.float64)
        self.reference = torch.randn(*shape, generator=random, dtype=torch.float64)
        self.rewards_B = torch.rand(len(self.sequences), generator=random, dtype=torch.float64)

    def logs(self, table: Tensor) -> Tensor:
        """Logprobs of all sequences' tokens [B, T]."""
        return torch.log_softmax(table, -1)[self.rows_BT, self.sequences]

    def heads(self, table: Tensor) -> Tensor:
        """Logprobs of the whole vocabulary before each token [B, T, V]."""
        return torch.log_softmax(table, -1)[self.rows_BT]

    def probabilities(self, table: Tensor) -> Tensor:
        """Probability of each sequence [B]."""
        return self.logs(table).sum(1).exp()

    def expected_gradient(
        self, sampler: Tensor, given_B: Tensor, reference: bool = False, **fields: object
    ) -> Tensor:
        """Gradient of E over the sampler of the objective's loss, summed over each sequence's tokens."""
        settings = {"advantage": "given", "aggregation": "sequence_sum", "clip_low": None, "clip_high": None}
        spec = resolve("grpo", {**settings, **fields})
        batch = GlobalBatch(
            rewards_B=self.rewards_B,
            groups_B=torch.zeros(len(self.sequences), dtype=torch.long),
            lengths_B=torch.full((len(self.sequences),), self.sequences.shape[1]),
            sampler_BT=self.logs(sampler).detach(),
            reference_BT=self.logs(self.reference) if reference else None,
            head_sampler_BTK=self.heads(sampler).detach() if spec.score_centring else None,
            given_B=given_B,
        )
        prepared = prepare(spec, batch)
        weights_B = self.probabilities(sampler).detach()
        prepared = replace(prepared, scale_BT=weights_B[:, None].expand_as(prepared.scale_BT))
        head_BTK = self.heads(self.learner) if spec.score_centring else None
        loss, _ = objective(spec, prepared, self.logs(self.learner), head_BTK=head_BTK)
        return torch.autograd.grad(loss, self.learner)[0]

    def return_gradient(self, weights_B: Tensor | None = None) -> Tensor:
        """-gradient of sum over sequences of sg[weights] pi(y) R(y), the policy gradient itself."""
        weights_B = torch.ones_like(self.rewards_B) if weights_B is None else weights_B.detach()
        value = (weights_B * self.probabilities(self.learner) * self.rewards_B).sum()
        return -torch.autograd.grad(value, self.learner)[0]

    def kl_gradient(self, forward: bool) -> Tensor:
        """Gradient of sum over prefixes of sg[pi(prefix)] KL at that prefix: pi||ref, or ref||pi."""
        p, q = torch.log_softmax(self.learner, -1), torch.log_softmax(self.reference, -1)
        at_P = (p.exp() * (p - q)).sum(-1) if forward else (q.exp() * (q - p)).sum(-1)
        reached_P = torch.zeros(len(p), dtype=torch.float64)
        for t in range(self.sequences.shape[1]):
            reached_P.index_add_(0, self.rows_BT[:, t], self.probabilities(self.learner).detach())
        return torch.autograd.grad((reached_P * at_P).sum(), self.learner)[0]


@pytest.fixture(params=[1, 2, 3])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["reinforce", "no_ratio", "clip"])
def test_product_of_ratios_is_unbiased(world: World, loss: str) -> None:
    gradient = world.expected_gradient(
        world.sampler, world.rewards_B, loss=loss, correction="raw", correction_level="product", proximal="none"
    )
    close(gradient, world.return_gradient())


def test_live_ratio_is_unbiased_for_one_token() -> None:
    world = World(1)
    gradient = world.expected_gradient(
        world.sampler, world.rewards_B, loss="importance", proximal="sampler", correction="none"
    )
    close(gradient, world.return_gradient())


def test_on_policy_needs_no_correction(world: World) -> None:
    gradient = world.expected_gradient(
        world.learner.detach(), world.rewards_B, loss="reinforce", correction="none"
    )
    close(gradient, world.return_gradient())


def test_truncation_and_masking_have_their_closed_form_bias(world: World) -> None:
    rho_B = (world.probabilities(world.learner) / world.probabilities(world.sampler)).detach()
    product = {"loss": "reinforce", "correction_level": "product"}
    truncated = world.expected_gradient(
        world.sampler, world.rewards_B, correction="tis", cap_high=1.5, **product
    )
    # E_mu[min(rho, C) R grad log pi] = sum pi min(1, C / rho) R grad log pi
    close(truncated, world.return_gradient((1.5 / rho_B).clamp(max=1)))
    masked = world.expected_gradient(
        world.sampler, world.rewards_B, correction="mis", cap_high=1.5, cap_low=0.4, **product
    )
    close(masked, world.return_gradient(((rho_B >= 0.4) & (rho_B <= 1.5)).double()))
    assert not torch.allclose(truncated, world.return_gradient(), rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", None), ("k2", True), ("k3", False), ("k3_k2", True), ("k1_weighted", True), ("k3_weighted", True)],
)
def test_expected_gradient_of_each_kl_estimator(world: World, kind: str, expected: bool | None) -> None:
    gradient = world.expected_gradient(
        world.learner.detach(),
        torch.zeros_like(world.rewards_B),
        reference=True,
        correction="none",
        kl_beta=1.0,
        kl_kind=kind,
    )
    close(gradient, torch.zeros_like(gradient) if expected is None else world.kl_gradient(expected))


@pytest.mark.parametrize("kind", ["k1_weighted", "k3_weighted"])
@pytest.mark.parametrize(
    "route", [{"proximal": "sampler", "correction": "none"}, {"proximal": "none", "correction": "raw"}]
)
def test_weighted_kl_is_exact_off_policy_too(kind: str, route: dict[str, str]) -> None:
    world = World(1)
    gradient = world.expected_gradient(
        world.sampler, torch.zeros_like(world.rewards_B), reference=True, kl_beta=1.0, kl_kind=kind, **route
    )
    close(gradient, world.kl_gradient(True))


CENTRINGS = [
    {"correction": "none"},
    {"correction": "tis", "cap_high": 1.2},
    {"correction": "mis", "cap_high": 1.5, "cap_low": 0.5},
]


@pytest.mark.parametrize("correction", CENTRINGS)
def test_full_head_centring_has_no_gradient_for_a_constant_advantage(
    world: World, correction: dict[str, object]
) -> None:
    constant_B = torch.full_like(world.rewards_B, 0.7)
    plain = {"loss": "reinforce", **correction}
    centred = world.expected_gradient(world.sampler, constant_B, score_centring=True, **plain)
    close(centred, torch.zeros_like(centred))
    assert world.expected_gradient(world.sampler, constant_B, **plain).abs().max() > 1e-3


@pytest.mark.parametrize("correction", CENTRINGS)
def test_centring_changes_nothing_on_policy(world: World, correction: dict[str, object]) -> None:
    sampler, plain = world.learner.detach(), {"loss": "reinforce", **correction}
    centred = world.expected_gradient(sampler, world.rewards_B, score_centring=True, **plain)
    close(centred, world.expected_gradient(sampler, world.rewards_B, **plain))
