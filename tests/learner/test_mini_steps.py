"""Several optimizer steps on one batch: each is its own part's, against a policy frozen before the first."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.minibatch import group_parts, only
from slipstream.algo.prepare import prepare
from slipstream.algo.settings.recipes import resolve
from slipstream.errors import RunHalted
from slipstream.learner.batch.collect import global_batch

RATIO = "slipstream_objective_policy_ratio_max"
LOSS = "slipstream_objective_loss"
MASKED = "slipstream_objective_masked_m2po_ratio"


def _copy(trainer):
    return {name: value.clone() for name, value in trainer.tensors().items()}


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _logprobs(trainer, groups):
    """Logprobs of every sample, each from a forward pass of its own."""
    rows = []
    for group, arrays in groups:
        ids, first = arrays.token_ids, 0
        for sample in group.samples:
            own = torch.tensor([*arrays.prompt_ids.tolist(), *ids[first : first + sample.tokens].tolist()])
            table_TV = trainer.policy.module(input_ids=own[None], use_cache=False).logits[0].log_softmax(-1)
            start = len(arrays.prompt_ids)
            rows.append(table_TV[start - 1 : -1].gather(1, own[start:, None]).squeeze(1))
            first += sample.tokens
    return rows


@pytest.mark.parametrize(
    ("groups", "parts", "found"),
    [(4, 1, [4]), (8, 4, [2, 2, 2, 2]), (5, 2, [2, 3]), (2, 4, [1, 1])],
)
def test_parts_are_whole_groups_in_order(groups, parts, found):
    """The last batch of finite data may be smaller than the number of parts."""
    cut = group_parts(groups, parts)
    assert [len(part) for part in cut] == found
    assert [index for part in cut for index in part] == list(range(groups))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "longest", "prompt_mean"])
def test_one_part_is_the_batch_itself(random_groups, aggregation):
    groups = random_groups()
    spec, batch = resolve("grpo", {"aggregation": aggregation}), global_batch(groups, 0, 4)
    whole = prepare(spec, batch)
    part = only(spec, whole, batch.groups_B, range(len(groups)))
    for name in ("mask_BT", "fresh_BT", "keep_BT", "scale_BT", "gradient_B", "advantages_BT"):
        assert torch.equal(getattr(part, name), getattr(whole, name)), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "longest", "prompt_mean"])
def test_two_mini_steps_are_the_steps_of_two_batches_to_the_bit(make_trainer, random_groups, aggregation):
    """Each with the denominators of its own groups, and the optimizer's state of the one before."""
    groups, objective = random_groups(), {"aggregation": aggregation}
    both, apart = make_trainer(objective, learner={"n_mini": 2}), make_trainer(objective)
    report = both.step(groups, 0)
    parts = [apart.step(groups[:2], 0), apart.step(groups[2:], 0)]
    assert _same(_copy(both), _copy(apart))
    assert (report.stepped, report.made, report.updates) == (True, 2, 2)
    assert report.metrics[LOSS] == pytest.approx(sum(part.metrics[LOSS] for part in parts) / 2)
    assert report.gradient_norm == max(part.gradient_norm for part in parts)
    assert report.completion_tokens == sum(part.completion_tokens for part in parts)


@pytest.mark.parametrize(
    "objective",
    [{"proximal": "sampler", "correction": "none"}, {"proximal": "approximate", "correction": "tis"}],
)
def test_policies_that_need_no_pass_are_those_of_two_batches_too(make_trainer, random_groups, objective):
    """The sampler is frozen by itself, and the guess follows from it and each token's age."""
    groups = random_groups()
    both, apart = make_trainer(objective, learner={"n_mini": 2}), make_trainer(objective)
    report = both.step(groups, 3)
    for half in (groups[:2], groups[2:]):
        apart.step(half, 3)
    assert _same(_copy(both), _copy(apart))
    assert "proximal" not in report.seconds


@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("loss", ["clip", "cispo"])
def test_the_first_ratio_is_exactly_1_and_the_next_has_moved(make_trainer, random_groups, tokens, loss):
    trainer = make_trainer(
        {"proximal": "recompute", "correction": "tis", "loss": loss},
        learner={"n_mini": 2, "micro_batch_tokens": tokens},
    )
    ratios, make = [], trainer._mini_step

    def watched(*arguments):
        tally = make(*arguments)
        metrics = finish_metrics(tally)
        ratios.append((metrics["slipstream_objective_policy_ratio_mean"], metrics[RATIO]))
        return tally

    trainer._mini_step = watched
    trainer.step(random_groups(), 0)
    assert ratios[0] == (1.0, 1.0)
    assert ratios[1][1] > 1.0


def test_the_second_step_is_decoupled_ppo_against_the_frozen_policy(make_trainer, random_groups):
    """Gradient of (1/N) sum w max(-A r, -A clip(r)), w = min(pi_o / mu, 2), by plain autograd."""
    groups = random_groups()
    trainer = make_trainer({"proximal": "recompute", "correction": "tis"}, learner={"n_mini": 2})
    with torch.no_grad():
        frozen = _logprobs(trainer, groups)
    caught, step = [], trainer.optimizer.step

    def catch(norm, factor):
        caught.append({name: p.grad.clone() for name, p in trainer.policy.parameters().items()})
        if len(caught) == 1:
            step(norm, factor)

    trainer.optimizer.step = catch
    trainer.step(groups, 0)
    trainer.policy.module.zero_grad(set_to_none=True)
    half = sum(len(group.samples) for group, _ in groups[:2])
    advantages = prepare(resolve("grpo", {}), global_batch(groups, 0, 4)).advantages_BT[half:, 0].float()
    total, losses = 0, []
    for now_T, old_T, advantage in zip(_logprobs(trainer, groups[2:]), frozen[half:], advantages, strict=True):
        ratio_T, weight_T = (now_T - old_T).exp(), (old_T + 2.0).exp().clamp(max=2.0)
        surrogate_T = torch.maximum(-advantage * ratio_T, -advantage * ratio_T.clamp(0.8, 1.2))
        losses.append((weight_T * surrogate_T).sum())
        total += len(now_T)
    (torch.stack(losses).sum() / total).backward()
    for name, parameter in trainer.policy.parameters().items():
        assert (caught[1][name] - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name


def test_a_nonfinite_mini_step_is_skipped_and_counted_and_the_next_one_goes_on(make_trainer, random_groups):
    groups = random_groups()
    trainer, other = make_trainer(learner={"n_mini": 2}), make_trainer()
    bad = iter([math.nan, 1.0])
    parameter = trainer.policy.parameters()["model.norm.weight"]
    hook = parameter.register_hook(lambda gradient: gradient * next(bad))
    report = trainer.step(groups, 0)
    hook.remove()
    assert (report.stepped, report.reason, report.made, report.updates) == (True, "", 1, 1)
    assert report.skips == {"nonfinite": 1}
    assert trainer.optimizer.clock == 0.5  # the schedule does not count what was skipped
    assert report.idle == {0: "nonfinite", 1: "nonfinite"}
    assert math.isnan(report.gradient_norm)
    assert (trainer.nonfinite, trainer.nonfinite_in_a_row) == (1, 0)
    other.step(groups[2:], 0)
    assert _same(_copy(trainer), _copy(other))


def test_a_batch_whose_parts_are_all_nonfinite_counts_once_towards_the_halt(make_trainer, random_groups):
    trainer = make_trainer(learner={"n_mini": 4, "max_nonfinite_steps": 2})
    parameter = trainer.policy.parameters()["model.norm.weight"]
    hook = parameter.register_hook(lambda gradient: gradient * math.nan)
    assert trainer.step(random_groups(), 0).skips == {"nonfinite": 4}
    assert (trainer.nonfinite, trainer.nonfinite_in_a_row) == (4, 1)
    with pytest.raises(RunHalted, match="2 steps in a row were not finite"):
        trainer.step(random_groups(), 0)
    hook.remove()
    assert trainer.step(random_groups(), 0).stepped
    assert trainer.nonfinite_in_a_row == 0


def test_a_part_without_gradient_makes_no_step(make_trainer, make_group):
    groups = [make_group([7], [[1], [2]], [1.0, 1.0]), make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0], 1)]
    report = make_trainer(learner={"n_mini": 2}, batch={"groups": 2}).step(groups, 0)
    assert (report.made, report.skips, report.skipped_groups) == (1, {"no_gradient": 1}, 1)
    assert report.idle == {0: "no_gradient"}
    report = make_trainer(learner={"n_mini": 2}, batch={"groups": 2}).step(groups[:1] * 2, 0)
    assert (report.stepped, report.reason, report.skips) == (False, "no_gradient", {"no_gradient": 2})


def test_schedule_ends_with_the_last_mini_step(make_trainer, random_groups):
    trainer = make_trainer(optimizer={"schedule": "linear"}, learner={"n_mini": 2}, run={"steps": 2})
    trainer.step(random_groups(), 0)
    report = trainer.step(random_groups(seed=1), 0)
    assert (report.updates, report.learning_rate) == (4, 0.0)


def test_m2po_trims_over_samples_without_gradient_too(make_trainer, make_group):
    """Their proximal logprobs are needed, though they never train: a whole batch's second moment decides."""
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0]), make_group([7], [[1], [2]], [1.0, 1.0], 1)]
    trainer = make_trainer({"proximal": "recompute", "m2po_tau": 1e-4})
    with torch.no_grad():
        rows = iter(_logprobs(trainer, groups))
        for group, arrays in groups:  # a sampler that is the learner, so that nothing is far from it
            arrays.logprobs = torch.cat([next(rows) for _ in group.samples]).numpy()
    report = trainer.step(groups, 0)
    assert report.made == 1
    assert report.metrics[MASKED] == 0.0
