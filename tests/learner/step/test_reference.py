"""The KL to a reference model: the right gradient, from the right weights, and nothing where it is not asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slipstream.algo.prepare import prepare
from slipstream.algo.settings.recipes import resolve
from slipstream.config.load import build
from slipstream.config.sections.data_config import ModelSection
from slipstream.errors import UserError
from slipstream.learner.batch.collect import global_batch
from slipstream.learner.checkpoint.finding import thin
from slipstream.learner.checkpoint.identity import identity_of, refuse_changed
from slipstream.learner.checkpoint.trainer_state import OPTIMIZER_FILES
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.model.model import Policy
from slipstream.learner.step import reference as reference_module
from slipstream.learner.step.reference_source import find_reference, reference_digest

BETA = 0.5
KL = "slipstream_objective_kl_nats"


@pytest.fixture(scope="module")
def folders(make_llama, tmp_path_factory):
    """Two models of the same tokens: the policy, and one whose head and layers are others."""
    found = []
    for name, spread in (("policy", 0.2), ("other", 0.3)):
        folder = make_llama(tmp_path_factory.mktemp(name), initializer_range=spread)
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
        found.append(folder)
    return found


@pytest.fixture
def train(make_trainer, folders):
    def make(source=None, objective=None, learner=None, **more):
        reference = {"source": str(folders[1]) if source is None else source, **more.pop("reference", {})}
        terms = {"kl_beta": BETA, **(objective or {})}
        return make_trainer(
            terms, learner={"reference": reference, **(learner or {})}, folder=folders[0], **more
        )

    return make


def _logprobs(policy, groups):
    rows = []
    for group, arrays in groups:
        first, start = 0, len(arrays.prompt_ids)
        for sample in group.samples:
            ids = [*arrays.prompt_ids.tolist(), *arrays.token_ids[first : first + sample.tokens].tolist()]
            own = torch.tensor(ids)
            table_TV = policy.module(input_ids=own[None], use_cache=False).logits[0].log_softmax(-1)
            rows.append(table_TV[start - 1 : -1].gather(1, own[start:, None]).squeeze(1))
            first += sample.tokens
    return rows


def _kl(kind, now_T, reference_T):
    """Schulman's estimators as they are written down; autograd does the rest."""
    z_T = reference_T - now_T
    live_T = (now_T - now_T.detach()).exp()
    match kind:
        case "k2":
            return z_T.square() / 2
        case "k3":
            return z_T.exp() - z_T - 1
        case "k1_weighted":
            return live_T * -z_T
    raise AssertionError(kind)


def _close(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("kind", ["k2", "k3", "k1_weighted"])
def test_gradient_of_the_kl_is_that_of_the_plain_formula(
    train, folders, random_groups, kind, tokens, gradients_of
):
    """(1/N) sum of -A log pi + beta KL, by plain autograd through both models, sample by sample."""
    trainer = train(objective={"kl_kind": kind, "kl_coeff_clamp": None}, learner={"micro_batch_tokens": tokens})
    other = Policy(folders[1], ModelSection(source=str(folders[1])), "cpu")
    groups = random_groups()
    with torch.no_grad():
        rows = iter(_logprobs(trainer.policy, groups))
        for group, arrays in groups:
            arrays.logprobs = torch.cat([next(rows) for _ in group.samples]).numpy()
        references = _logprobs(other, groups)
    advantages = prepare(resolve("grpo", {}), global_batch(groups, 0, 4)).advantages_BT[:, 0].float()
    found, report = gradients_of(trainer, groups)
    trainer.policy.module.zero_grad(set_to_none=True)
    now = _logprobs(trainer.policy, groups)
    kl = torch.cat([_kl(kind, a, b) for a, b in zip(now, references, strict=True)])
    gain = torch.cat([a * row for a, row in zip(advantages, now, strict=True)])
    ((BETA * kl - gain).sum() / len(kl)).backward()
    _close(found, {name: p.grad for name, p in trainer.policy.parameters().items()}, 2e-5)
    assert report.metrics[KL] == pytest.approx(float(kl.detach().mean()), rel=1e-4)


def test_kl_in_the_reward_lowers_the_advantages_of_its_own_group(train, folders, make_group, gradients_of):
    """Also those of samples without weight of their own: all of a group's samples are scored."""
    groups = [make_group([5, 6], [[1, 2, 3], [1, 4], [3, 3]], [1.0, 0.0, 0.0])]
    trainer = train(objective={"kl_place": "reward", "kl_kind": "k1", "advantage": "mean_only"})
    other = Policy(folders[1], ModelSection(source=str(folders[1])), "cpu")
    with torch.no_grad():
        references, now = _logprobs(other, groups), _logprobs(trainer.policy, groups)
    groups[0][1].logprobs = torch.cat(now).numpy()
    penalty_B = torch.stack([(a - b).sum() for a, b in zip(now, references, strict=True)])
    rewards_B = torch.tensor([1.0, 0.0, 0.0]) - BETA * penalty_B
    found, _ = gradients_of(trainer, groups)
    trainer.policy.module.zero_grad(set_to_none=True)
    rows = _logprobs(trainer.policy, groups)
    weighted = [a * row for a, row in zip(rewards_B - rewards_B.mean(), rows, strict=True)]
    (-torch.cat(weighted).sum() / 7).backward()
    _close(found, {name: p.grad for name, p in trainer.policy.parameters().items()})


@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 2}}, {"reference": {"offload": True}}])
def test_the_start_is_its_own_reference_at_first(train, random_groups, learner):
    """The KL is exactly 0 before the first step, and no more after it."""
    more = {"learner": learner} if "lora" in learner else learner
    trainer = train("start", **more)
    assert trainer.step(random_groups(), 0).metrics[KL] == 0.0
    assert trainer.step(random_groups(), 0).metrics[KL] > 0.0


def test_adapters_need_no_second_model(train, random_groups, monkeypatch):
    monkeypatch.setattr(reference_module, "_load", lambda *_: pytest.fail("a second model was loaded"))
    plain, kl = (train("start", {"kl_beta": beta}, {"lora": {"rank": 2}}) for beta in (1e-9, 5.0))
    for trainer in (plain, kl):
        assert trainer.step(random_groups(), 0).stepped
        trainer.step(random_groups(seed=1), 0)
        assert all(value.requires_grad for value in trainer.policy.parameters().values())
    first, second = plain.tensors(), kl.tensors()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_without_a_coefficient_there_is_no_model_and_no_pass(make_trainer, random_groups, monkeypatch):
    monkeypatch.setattr(reference_module, "_load", lambda *_: pytest.fail("a second model was loaded"))
    report = make_trainer().step(random_groups(), 0)
    assert "reference" not in report.seconds
    assert KL not in report.metrics


def test_only_samples_with_weight_are_scored(train, make_group):
    """Those of a group without spread are, for the KL pulls them too; those that are all too old are not."""
    old, fresh = [(0, 2)], [(9, 2)]
    groups = [
        make_group([5], [[1, 2], [3, 4]], [1.0, 0.0], version=[fresh, old]),
        make_group([6], [[1, 2], [3, 4]], [1.0, 1.0], 1, version=[old, fresh]),
    ]
    trainer, seen = train(), []
    logprobs = trainer._preparing.reference.logprobs

    def watched(batch, temperature):
        seen.extend(batch.samples_S.tolist())
        return logprobs(batch, temperature)

    trainer._preparing.reference.logprobs = watched
    trainer.step(groups, 9)
    assert sorted(seen) == [0, 3]


def test_the_reference_stays_as_it_is(train, folders, random_groups):
    trainer = train()
    for seed in range(2):
        trainer.step(random_groups(seed=seed), 0)
    kept = trainer._preparing.reference._policy.tensors()
    saved = load_file(folders[1] / "model.safetensors")
    assert all(torch.equal(kept[name], saved[name]) for name in kept)
    assert not any(p.requires_grad for p in trainer._preparing.reference._policy.module.parameters())


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}])
def test_a_run_that_starts_from_a_checkpoint_has_that_as_its_reference(
    train, make_trainer, folders, random_groups, tmp_path, lora
):
    first = make_trainer(folder=folders[0], learner=lora)
    first.step(random_groups(), 0)
    start = write(tmp_path / "checkpoints", 1, first.save_writers())
    trainer = train("start", learner={"start_from": str(tmp_path), **lora})
    trainer.load_weights(start)
    assert trainer.step(random_groups(seed=1), 0).metrics[KL] == 0.0


def test_a_bad_reference_is_a_skipped_step(train, random_groups):
    trainer = train()
    with torch.no_grad():
        trainer._preparing.reference._policy.head_weight[2] = float("nan")
    report = trainer.step(random_groups(), 0)
    assert (report.stepped, report.reason) == (False, "nonfinite")
    assert "reference logprob of sample" in report.detail


def test_live_dropout_is_refused_with_a_reference(folders):
    policy = Policy(folders[0], ModelSection(source=str(folders[0])), "cpu")
    policy.module.model.layers[1].add_module("noise", nn.Dropout(0.1))
    policy.module.train()
    config = _config(folders[0], "start")
    source = find_reference(config, folders[0])
    with pytest.raises(UserError, match=r"layers\.1\.noise drops out a share of 0\.1"):
        reference_module.Reference(source, policy, config, None)


def test_a_reference_that_lacks_a_tensor_is_refused(folders, make_llama, tmp_path):
    other = make_llama(tmp_path)
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    tensors = load_file(other / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    policy = Policy(folders[0], ModelSection(source=str(folders[0])), "cpu")
    config = _config(folders[0], str(other))
    source = find_reference(config, folders[0])
    with pytest.raises(UserError, match=r"lacks tensor 'model\.norm\.weight'"):
        reference_module.Reference(source, policy, config, SimpleNamespace(mesh=None))


def _config(folder, source, **learner):
    tree = {
        "model": {"source": str(folder)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "objective": {"kl_beta": BETA},
        "learner": {"reference": {"source": source}, **learner},
    }
    return build(tree)[0]


def test_other_tokens_are_refused_before_a_model_is_loaded(folders, make_llama, tmp_path):
    larger = make_llama(tmp_path / "larger", vocab_size=48)
    (larger / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    renamed = make_llama(tmp_path / "renamed")
    (renamed / "tokenizer.json").write_text('{"model": {"vocab": {"b": 1}}}')
    for folder in (larger, renamed):
        with pytest.raises(UserError, match=r"learner\.reference\.source .*: its vocabulary"):
            find_reference(_config(folders[0], str(folder)), folders[0])


def test_a_reference_that_is_not_there_is_named_with_its_setting(folders, tmp_path):
    with pytest.raises(UserError, match=r"learner\.reference\.source: model '.*nowhere': no such folder"):
        find_reference(_config(folders[0], str(tmp_path / "nowhere")), folders[0])


def test_a_resume_with_another_reference_is_refused_by_name(folders, tmp_path):
    """Its content decides, not where it lies or how it is split into files."""
    policy, other = folders
    first = identity_of(
        _config(policy, str(other)), "d", policy, reference_digest(_config(policy, str(other)), policy)
    )
    (tmp_path / "identity.json").write_text(json.dumps(first))
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (moved / name).write_text(
            (other / name).read_text().replace('"transformers_version": "', '"transformers_version": "9')
        )
    tensors = load_file(other / "model.safetensors")
    save_file(dict(list(tensors.items())[:5]), moved / "model-1.safetensors")
    save_file(dict(list(tensors.items())[5:]), moved / "model-2.safetensors")
    (moved / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: f"model-{1 + (i >= 5)}.safetensors" for i, n in enumerate(tensors)}})
    )
    assert reference_digest(_config(policy, str(moved)), policy) == first["reference model"]
    changed = dict(first, **{"reference model": reference_digest(_config(policy, "start"), policy)})
    with pytest.raises(
        UserError, match=r"reference model \(learner\.reference\.source .*\) does not hold what it did"
    ):
        refuse_changed(tmp_path, changed)


def test_a_start_that_lost_its_optimizer_is_the_same_reference(make_trainer, folders, random_groups, tmp_path):
    """Another run may thin its checkpoints; what this one measures its KL to are their weights."""
    trainer = make_trainer(folder=folders[0])
    start = write(tmp_path / "checkpoints", 1, trainer.save_writers())
    config = _config(folders[0], "start", start_from=str(start))
    before = reference_digest(config, folders[0])
    assert thin(start.parent, 0, OPTIMIZER_FILES) == [start]
    assert reference_digest(config, folders[0]) == before
    trainer.step(random_groups(), 0)
    write(start.parent, 1, trainer.save_writers())
    assert reference_digest(config, folders[0]) != before


def test_a_reference_that_does_not_name_its_tokens_is_taken(folders, make_llama, tmp_path):
    folder = make_llama(tmp_path / "bare")
    (folder / "tokenizer.model").write_bytes(b"")  # names them in a form that is not read here
    assert find_reference(_config(folders[0], str(folder)), folders[0]).folder == folder
