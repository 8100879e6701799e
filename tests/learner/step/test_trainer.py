"""The step: right gradient whatever the split, and nothing moves when nothing should."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.errors import RunHalted, StalenessError
from slipstream.learner.batch.micro_batches import completions_of


def _copy(trainer):
    return {name: value.clone() for name, value in trainer.tensors().items()}


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _plain_logprobs(trainer, groups, temperature=1.0):
    """Logprobs of each group's samples, each from a forward pass of its own."""
    for (_, arrays), members in zip(groups, completions_of(groups), strict=True):
        logprobs = []
        for member in members:
            ids = torch.tensor([*arrays.prompt_ids.tolist(), *member.actions.tolist()])
            logits_TV = trainer.policy.module(input_ids=ids[None], use_cache=False).logits[0] / temperature
            first = len(arrays.prompt_ids) - 1
            table_TV = logits_TV[first:-1].log_softmax(-1)
            logprobs.append(table_TV.gather(1, ids[first + 1 :, None]).squeeze(1))
        yield arrays, logprobs


def _on_policy(trainer, groups, temperature=1.0):
    """The groups with the model's own logprobs as the sampler's, so that every ratio is 1."""
    with torch.no_grad():
        for arrays, logprobs in _plain_logprobs(trainer, groups, temperature):
            arrays.logprobs = torch.cat(logprobs).numpy()
    return groups


def _by_hand(trainer, groups, weights, temperature=1.0):
    """Gradient of -sum(weight * log pi) / tokens, sample by sample; `weights[b]` is a number per token."""
    trainer.policy.module.zero_grad(set_to_none=True)
    total = sum(sample.tokens for group, _ in groups for sample in group.samples)
    logprobs = [row for _, rows in _plain_logprobs(trainer, groups, temperature) for row in rows]
    for row_T, weight in zip(logprobs, weights, strict=True):
        (-(torch.as_tensor(weight) * row_T).sum() / total).backward()
    return {name: p.grad.clone() for name, p in trainer.policy.parameters().items()}


def _assert_close(first, second, tolerance):
    for name, value in second.items():
        assert (first[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize("tokens", [16, 24, 64])
def test_gradient_does_not_depend_on_the_micro_batches(make_trainer, random_groups, tokens, gradients_of):
    """Case 60: one denominator for the whole batch, however it is cut."""
    groups = random_groups(count=6)
    whole = gradients_of(make_trainer(learner={"micro_batch_tokens": 4096}), groups)[0]
    cut = make_trainer(learner={"micro_batch_tokens": tokens})
    _assert_close(gradients_of(cut, groups)[0], whole, 1e-5)


def test_metrics_do_not_depend_on_the_micro_batches(make_trainer, random_groups):
    groups = random_groups(count=6)
    whole = make_trainer(learner={"micro_batch_tokens": 4096}).step(groups, 0)
    cut = make_trainer(learner={"micro_batch_tokens": 16}).step(groups, 0)
    assert whole.micro_batches == 1
    assert cut.micro_batches > 4
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)


def test_entropy_is_measured_also_where_it_has_no_term(make_trainer, make_group):
    trainer, group = make_trainer(), make_group([5, 6], [[1], [4]], [1.0, 0.0])
    with torch.no_grad():
        logs_V = (
            trainer.policy.module(input_ids=torch.tensor([[5, 6]]), use_cache=False)
            .logits[0, -1]
            .log_softmax(-1)
        )
    report = trainer.step([group], 0)
    entropy = -(logs_V.exp() * logs_V).sum().item()
    assert report.metrics["slipstream_objective_entropy_nats"] == pytest.approx(entropy, rel=1e-4)


def test_gradient_is_that_of_plain_policy_gradient_on_policy(make_trainer, make_group, gradients_of):
    trainer = make_trainer()
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0]), make_group([7], [[1], [2]], [1.0, 1.0], 1)]
    ours = gradients_of(trainer, _on_policy(trainer, groups))[0]
    hand = _by_hand(trainer, groups, [[1.0], [-1.0], [0.0], [0.0]])
    _assert_close(ours, hand, 1e-5)


def test_temperature_divides_the_logits(make_trainer, make_group, gradients_of):
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0])]
    trainer = make_trainer(sampling={"temperature": 0.5})
    _assert_close(
        gradients_of(trainer, _on_policy(trainer, groups, 0.5))[0],
        _by_hand(trainer, groups, [[1.0], [-1.0]], 0.5),
        1e-5,
    )


def test_old_tokens_lose_their_weight_and_the_denominator_stays(make_trainer, make_group, gradients_of):
    versions = [[(2, 2), (5, 1)], [(5, 2)]]
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0], version=versions)]
    trainer = make_trainer(eta=2)
    ours = gradients_of(trainer, _on_policy(trainer, groups), version=5)[0]
    hand = _by_hand(trainer, groups, [[0.0, 0.0, 1.0], [-1.0]])
    _assert_close(ours, hand, 1e-5)


def test_token_from_a_version_that_does_not_exist_is_an_error(make_trainer, make_group):
    with pytest.raises(StalenessError, match="version 3"):
        make_trainer().step([make_group([5], [[1], [2]], [1.0, 0.0], version=3)], 2)


def test_nan_gradient_at_step_3_leaves_everything_as_it_was(make_trainer, random_groups):
    """Case 63: the step is skipped before the optimizer, and counted; the next one goes on."""
    trainer = make_trainer()
    parameter = next(iter(trainer.policy.parameters().values()))
    for seed in range(2):
        assert trainer.step(random_groups(seed=seed), 0).stepped
    before, moments = _copy(trainer), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    hook = parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.nan))
    report = trainer.step(random_groups(seed=2), 0)
    hook.remove()
    assert (report.stepped, report.reason, report.updates) == (False, "nonfinite", 2)
    assert "nan" in report.detail
    assert _same(_copy(trainer), before)
    assert _same(trainer.optimizer.state(), moments)
    assert (trainer.nonfinite, trainer.nonfinite_in_a_row) == (1, 1)
    assert trainer.step(random_groups(seed=3), 0).updates == 3
    assert (trainer.nonfinite, trainer.nonfinite_in_a_row) == (1, 0)


def test_nan_logprob_is_a_skipped_step_that_names_the_sample(make_trainer, make_group):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.policy.head_weight[9] = math.nan
    report = trainer.step([make_group([5], [[1], [2]], [1.0, 0.0])], 0)
    assert report.reason == "nonfinite"
    assert "sample 0" in report.detail


def test_too_many_nonfinite_steps_halt_the_run(make_trainer, random_groups):
    trainer = make_trainer(learner={"max_nonfinite_steps": 2})
    next(iter(trainer.policy.parameters().values())).register_hook(lambda gradient: gradient * math.inf)
    assert trainer.step(random_groups(), 0).reason == "nonfinite"
    with pytest.raises(RunHalted, match="max_nonfinite_steps"):
        trainer.step(random_groups(), 0)


@pytest.mark.parametrize("case", ["equal rewards", "all truncated", "all unscored", "all empty", "all old"])
def test_batch_without_gradient_touches_nothing(make_trainer, make_group, random_groups, case):
    """Cases 46 and 49: no step, no decay, no moments, finite metrics."""
    trainer = make_trainer({"mask_truncated": True}, optimizer={"weight_decay": 0.1}, eta=1)
    assert trainer.step(random_groups(), 0).stepped
    before, moments = _copy(trainer), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    groups = {
        "equal rewards": [make_group([5], [[1, 3], [2]], [1.0, 1.0])],
        "all truncated": [make_group([5], [[1, 3], [2]], [1.0, 0.0], finish=["length", "length"])],
        "all unscored": [make_group([5], [[1, 3], [2]], [None, None])],
        "all empty": [make_group([5], [[], []], [1.0, 0.0])],
        "all old": [make_group([5], [[1, 3], [2]], [1.0, 0.0], version=0)],
    }[case]
    report = trainer.step(groups, 9 if case == "all old" else 0)
    reason, idle = {
        "equal rewards": ("no_gradient", "no_gradient"),
        "all truncated": ("no_weight", "masked"),
        "all unscored": ("no_weight", "unscored"),
        "all empty": ("no_weight", "empty"),
        "all old": ("too_old", "stale"),
    }[case]
    assert (report.stepped, report.reason, report.updates) == (False, reason, 1)
    assert report.idle == {0: idle}
    assert report.micro_batches == 0
    assert _same(_copy(trainer), before)
    assert _same(trainer.optimizer.state(), moments)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_a_batch_with_a_group_that_cannot_have_weight_is_not_trained_on(make_trainer, make_group):
    """The group is named, and the others train in the step that is made without it."""
    trainer = make_trainer(eta=1)
    before = _copy(trainer)
    fresh = make_group([5], [[1, 3], [2]], [1.0, 0.0], version=9)
    old = make_group([5], [[1, 3], [2]], [1.0, 0.0], ticket=1, version=0)
    half = make_group([5], [[1, 3], [2]], [1.0, 0.0], ticket=2, version=[[(0, 1), (9, 1)], [(0, 1)]])
    alone = make_group([5], [[1, 3], [2]], [1.0, None], ticket=3, version=9)
    report = trainer.step([fresh, old, half, alone], 9)
    assert (report.stepped, report.reason, report.made) == (False, "too_old", 0)
    assert (report.idle, report.weights) == ({1: "stale", 3: "unscored"}, [3, 0, 1, 0])
    assert _same(_copy(trainer), before)
    report = trainer.step([fresh, half], 9)
    assert (report.stepped, report.idle, report.weights) == (True, {}, [3, 1])


def test_groups_of_lost_versions_are_too_old_by_their_distance(make_trainer, make_group):
    """Seven updates were lost: what their last weights sampled is seven from the line, and has no weight at 2."""
    groups = [make_group([5], [[1], [2]], [1.0, 0.0], version=each) for each in (92, 93, 97)]
    report = make_trainer(eta=2).step(groups, 98, [(91, 97)])
    assert (report.stepped, report.idle) == (False, {1: "stale", 2: "stale"})


def test_empty_completion_counts_in_the_group_mean(make_trainer, make_group, gradients_of):
    """Case 46: it moves the baseline and contributes no token."""
    trainer = make_trainer({"advantage": "mean_only"})
    groups = [make_group([5], [[], [1, 2], [3], [4]], [0.0, 1.0, 0.0, 0.0])]
    ours = gradients_of(trainer, _on_policy(trainer, groups))[0]
    _assert_close(ours, _by_hand(trainer, groups, [[0.0], [0.75], [-0.25], [-0.25]]), 1e-5)


def test_zero_gradient_is_no_step(make_trainer, random_groups):
    trainer = make_trainer(optimizer={"weight_decay": 0.1})
    before = _copy(trainer)

    def erase(parameter):
        parameter.grad.zero_()

    for parameter in trainer.policy.parameters().values():
        parameter.register_post_accumulate_grad_hook(erase)
    trainer.policy._embedding.weight.requires_grad_(False)
    report = trainer.step(random_groups(), 0)
    assert (report.stepped, report.reason) == (False, "zero_gradient")
    assert _same(_copy(trainer), before)


def test_recomputed_proximal_policy_gives_the_same_first_step(make_trainer, random_groups, gradients_of):
    groups = random_groups()
    plain = gradients_of(make_trainer({"proximal": "none", "correction": "tis"}), groups)[0]
    recomputed = gradients_of(
        make_trainer({"proximal": "recompute", "correction": "tis"}, learner={"micro_batch_tokens": 24}), groups
    )[0]
    _assert_close(recomputed, plain, 1e-4)


def test_groups_without_spread_are_skipped_but_counted(make_trainer, make_group):
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4]], [1.0, 0.0]), make_group([7], [[1], [2]], [1.0, 1.0], 1)]
    report = make_trainer().step(groups, 0)
    assert (report.groups, report.skipped_groups) == (2, 1)
    assert (report.samples, report.gradient_samples, report.completion_tokens) == (4, 2, 7)
    assert report.model_tokens == 2 + 2  # prompt, and the shared beginning with its one continuation
    assert {"build", "forward", "backward", "optimizer"} <= report.seconds.keys()


def test_steps_raise_the_probability_of_the_rewarded_token(make_trainer, make_group):
    trainer = make_trainer(optimizer={"learning_rate": 3e-3})
    prompt, wanted = torch.tensor([[5, 6]]), 7
    generator = torch.Generator().manual_seed(0)

    def probabilities():
        with torch.no_grad():
            return trainer.policy.module(input_ids=prompt, use_cache=False).logits[0, -1].softmax(-1)

    before = float(probabilities()[wanted])
    for version in range(20):
        now = probabilities()
        tokens = torch.multinomial(now, 32, replacement=True, generator=generator).tolist()
        tokens[0] = wanted  # keeps the toy from waiting for luck
        rewards = [float(token == wanted) for token in tokens]
        group, arrays = make_group([5, 6], [[t] for t in tokens], rewards, version=version)
        arrays.logprobs = now[torch.tensor(tokens)].log().numpy()
        trainer.step([(group, arrays)], version)
    assert float(probabilities()[wanted]) > before + 0.3


def test_groups_of_lost_steps_train_again_with_the_weight_they_had(make_trainer, make_group):
    """A restart skips labels, not updates: version 9 is version 0's weights again, so its samples are fresh."""
    groups = [make_group([5], [[1], [2]], [1.0, 0.0], version=0)]
    assert make_trainer().step(groups, 9, [(1, 8)]).stepped
    report = make_trainer().step(groups, 9)
    assert (report.stepped, report.reason) == (False, "too_old")
