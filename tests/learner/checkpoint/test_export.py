"""An export is one folder for transformers, whichever ranks wrote the checkpoint, of the step that was asked for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.errors import UserError
from slipstream.learner.checkpoint.export import choose, write_weights
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.model.tensor_shards import RankFile, file_name


def two_ranks(trainer):
    """Writers of the files that two ranks would write of the trainer's model."""
    files = {}
    for rank in (0, 1):
        tensors, rows = {}, {}
        for name, value in trainer.tensors().items():
            half = -(-value.shape[0] // 2)
            tensors[name] = value[rank * half : (rank + 1) * half].clone()
            rows[name] = (rank * half, tuple(value.shape))
        files[file_name("model", rank, 2)] = RankFile(tensors, rows).save
    return files


@pytest.mark.parametrize("limit", [1 << 30, 20000])
def test_what_two_ranks_wrote_is_one_model(make_trainer, random_groups, llama_folder, tmp_path, limit):
    trainer = make_trainer()
    trainer.step(random_groups(), 0)
    checkpoint = write(tmp_path / "checkpoints", 1, two_ranks(trainer))
    target = tmp_path / "out"
    target.mkdir()
    write_weights(checkpoint, target, limit)
    several = (target / "model.safetensors.index.json").exists()
    assert several == (limit < 1 << 30)
    (target / "config.json").write_text((llama_folder / "config.json").read_text())
    loaded = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
    for name, value in trainer.tensors().items():
        assert torch.equal(loaded[name], value), name


def test_a_step_is_chosen_or_named_among_those_there_are(tmp_path):
    for step in (2, 5):
        write(tmp_path / "checkpoints", step, {"a": lambda path: path.write_text("x")})
    assert choose(tmp_path / "checkpoints", None)[0] == 5
    step, path = choose(tmp_path / "checkpoints", 2)
    assert (step, path.name) == (2, "step-00000002")
    with pytest.raises(UserError, match=r"--step 3.*there are: 2, 5"):
        choose(tmp_path / "checkpoints", 3)
    (path / "a").write_text("y")
    with pytest.raises(UserError, match="a has digest"):
        choose(tmp_path / "checkpoints", 2)
