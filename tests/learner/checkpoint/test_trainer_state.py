"""A checkpoint continues to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from slipstream.errors import RunHalted, UserError
from slipstream.learner.checkpoint.finding import thin
from slipstream.learner.checkpoint.trainer_state import OPTIMIZER_FILES
from slipstream.learner.checkpoint.writing import write


def _copy(trainer):
    return {name: value.clone() for name, value in trainer.tensors().items()}


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_step_after_a_load_is_bit_identical(make_trainer, random_groups, tmp_path):
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    trainer = make_trainer(optimizer=optimizer)
    for version in range(3):
        trainer.step(random_groups(seed=version), 0)
    folder = write(tmp_path, 3, trainer.save_writers())
    torch.rand(1)  # whatever draws random numbers next draws the same after a load
    drawn = torch.rand(4)
    straight = trainer.step(random_groups(seed=3), 0)

    resumed = make_trainer(optimizer=optimizer)
    resumed.load(folder)
    torch.rand(1)
    assert torch.equal(torch.rand(4), drawn)
    again = resumed.step(random_groups(seed=3), 0)
    assert again.updates == straight.updates == 4
    assert again.learning_rate == straight.learning_rate
    assert again.metrics == straight.metrics
    assert _same(_copy(resumed), _copy(trainer))
    assert _same(resumed.optimizer.state(), trainer.optimizer.state())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_updates_a_batch_goes_on_at_the_same_share_of_the_schedule(
    make_trainer, random_groups, tmp_path, before, after
):
    """50 steps, linear without warm-up: after 3 batches the fourth ends at 1 - 3/49 of the rate, in any parts."""
    optimizer = {"schedule": "linear", "learning_rate": 1e-3}
    trainer = make_trainer(optimizer=optimizer, learner={"n_mini": before})
    for version in range(3):
        trainer.step(random_groups(seed=version), 0)
    resumed = make_trainer(optimizer=optimizer, learner={"n_mini": after})
    resumed.load(write(tmp_path, 3, trainer.save_writers()))
    assert resumed.optimizer.clock == 3.0
    report = resumed.step(random_groups(seed=3), 0)
    assert report.updates == 3 * before + after
    assert report.learning_rate == pytest.approx(1e-3 * (1 - 3 / 49))


def test_a_checkpoint_without_a_clock_counts_its_updates(make_trainer, random_groups, tmp_path):
    trainer = make_trainer(learner={"n_mini": 2})
    trainer.step(random_groups(), 0)
    folder = write(tmp_path, 1, trainer.save_writers())
    counts = json.loads((folder / "trainer.json").read_text())
    del counts["clock"]
    (folder / "trainer.json").write_text(json.dumps(counts))
    resumed = make_trainer(learner={"n_mini": 2})
    resumed.load(folder)
    assert resumed.optimizer.clock == 1.0


def test_a_checkpoint_before_the_first_step_loads(make_trainer, random_groups, tmp_path):
    trainer = make_trainer()
    folder = write(tmp_path, 0, trainer.save_writers())
    resumed = make_trainer()
    resumed.step(random_groups(seed=5), 0)
    resumed.load(folder)
    assert resumed.step(random_groups(), 0).updates == trainer.step(random_groups(), 0).updates == 1
    assert _same(_copy(resumed), _copy(trainer))


def test_what_is_written_is_the_state_of_the_call_whatever_is_trained_meanwhile(
    make_trainer, random_groups, tmp_path
):
    trainer = make_trainer()
    trainer.step(random_groups(seed=1), 0)
    before, moments = _copy(trainer), {n: v.clone() for n, v in trainer.optimizer.state().items()}
    writers = trainer.save_writers()
    trainer.step(random_groups(seed=2), 1)
    resumed = make_trainer()
    resumed.load(write(tmp_path, 1, writers))
    assert _same(_copy(resumed), before)
    assert _same(resumed.optimizer.state(), moments)
    assert resumed.optimizer.updates == 1


@pytest.mark.parametrize("place", ["weights", "moments"])
def test_a_state_that_is_not_finite_is_never_a_checkpoint(make_trainer, random_groups, tmp_path, place):
    """Case 63, so far as it concerns checkpoints: the last good one stays."""
    trainer = make_trainer()
    trainer.step(random_groups(), 0)
    write(tmp_path, 1, trainer.save_writers())
    tensors = trainer.tensors() if place == "weights" else trainer.optimizer.state()
    next(value for value in tensors.values() if value.ndim == 2)[0, 0] = float("nan")
    with pytest.raises(RunHalted, match="is not finite, so no checkpoint is written"):
        write(tmp_path, 2, trainer.save_writers())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_tensors_have_hugging_face_names_and_tied_ones_appear_once(make_trainer, make_llama, tmp_path):
    tied = make_trainer()
    assert "model.embed_tokens.weight" in tied.tensors()
    assert "lm_head.weight" not in tied.tensors()
    free = make_trainer(folder=make_llama(tmp_path, tie_word_embeddings=False))
    assert "lm_head.weight" in free.tensors()
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(free.tensors())


def test_saved_weights_load_into_transformers(make_trainer, random_groups, llama_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = make_trainer()
    trainer.step(random_groups(), 0)
    trainer.save_writers()["model.safetensors"](tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, trainer.tensors()["model.embed_tokens.weight"])


def test_checkpoint_of_another_model_is_named(make_trainer, make_llama, tmp_path):
    trainer = make_trainer()
    folder = write(tmp_path / "checkpoints", 0, trainer.save_writers())
    other = make_trainer(folder=make_llama(tmp_path / "other", hidden_size=64))
    before = _copy(other)
    with pytest.raises(UserError, match="another model"):
        other.load(folder)
    assert _same(_copy(other), before)


@pytest.mark.parametrize("damage", ["missing", "broken", "schema"])
def test_unreadable_checkpoint_is_one_line(make_trainer, tmp_path, damage):
    trainer = make_trainer()
    folder = write(tmp_path, 0, trainer.save_writers())
    if damage == "missing":
        (folder / "trainer.safetensors").unlink()
    elif damage == "broken":
        (folder / "model.safetensors").write_bytes(b"no tensors")
    else:
        (folder / "trainer.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(UserError) as caught:
        trainer.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_whose_optimizer_was_taken_out_gives_its_weights_and_is_no_resume(
    make_trainer, random_groups, tmp_path
):
    trainer = make_trainer()
    for step in (1, 2):
        trainer.step(random_groups(), step - 1)
        write(tmp_path, step, trainer.save_writers())
        if step == 1:
            first = _copy(trainer)
    (older,) = thin(tmp_path, 1, OPTIMIZER_FILES)
    other = make_trainer()
    with pytest.raises(UserError, match=r"no optimizer \(learner\.checkpoint\.keep_optimizer_last\)"):
        other.load(older)
    other.load_weights(older)
    assert _same(_copy(other), first)
