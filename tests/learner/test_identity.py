"""What a run may not change while it goes on, and how a change is told."""

from __future__ import annotations

import json

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.learner.identity import (
    IDENTITY,
    identity_of,
    refuse_changed,
    refuse_changed_since,
    settings_of,
)


def config_of(**sections):
    tree = {
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "objective": {"recipe": "grpo"},
    }
    return build(tree | sections)[0]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint(tmp_path, model):
    folder = tmp_path / "runs" / "r" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / IDENTITY).write_text(json.dumps(identity_of(config_of(), "d1", model)))
    (folder / "COMPLETE").write_text("")
    return folder


def test_the_same_run_goes_on(checkpoint, model):
    refuse_changed(checkpoint, identity_of(config_of(), "d1", model))


def test_what_may_change_is_not_part_of_the_identity(checkpoint):
    learner = {"optimizer": {"learning_rate": 1e-3}, "checkpoint": {"every": 3}}
    refuse_changed(checkpoint, settings_of(config_of(learner=learner, staleness={"max_staleness": 2})))
    dtypes = {"precision": {"master": "float32", "transfer": "float32"}}
    refuse_changed(checkpoint, settings_of(config_of(learner=dtypes, model={"dtype": "bfloat16"})))


def test_an_older_checkpoint_is_compared_by_the_names_that_both_know(checkpoint):
    (checkpoint / IDENTITY).write_text(json.dumps({"model.dtype": "float32", "run.seed": 0}))
    refuse_changed(checkpoint, settings_of(config_of(model={"dtype": "bfloat16"})))
    with pytest.raises(UserError, match=r"run\.seed is 1 and was 0"):
        refuse_changed(checkpoint, settings_of(config_of(run={"seed": 1})))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"objective": {"recipe": "grpo", "clip_high": 0.31}}, "objective.clip_high is 0.31 and was 0.2"),
        ({"run": {"seed": 7}}, "run.seed is 7 and was 0"),
        (
            {"model": {"source": "tiny-sorter", "dtype": "bfloat16"}},
            "learner.precision.master is 'bfloat16' and was 'float32'; "
            "learner.precision.transfer is 'bfloat16' and was 'float32'",
        ),
        (
            {"learner": {"precision": {"master": "bfloat16"}}},
            "learner.precision.master is 'bfloat16' and was 'float32'",
        ),
        ({"sampling": {"temperature": 0.5}}, "objective.temperature is 0.5 and was 1.0"),
    ],
)
def test_a_changed_setting_is_told_by_name_with_both_values(checkpoint, changes, told):
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, settings_of(config_of(**changes)))
    assert told in str(caught.value)
    assert f"learner.start_from={checkpoint.parent.parent}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_data_another_reference_and_another_tokenizer_are_told_together(checkpoint, model):
    (model / "tokenizer.json").write_text('{"changed": 1}')
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, identity_of(config_of(), "d2", model, reference="abc"))
    for told in ("data set is 'd2' and was 'd1'", "reference model is 'abc' and was 'none'", "tokenizer is '"):
        assert told in str(caught.value)


def test_only_the_newest_checkpoint_that_is_sealed_counts(checkpoint, model):
    half = checkpoint.with_name("step-00000009")
    half.mkdir()
    (half / IDENTITY).write_text(json.dumps({"run.seed": 99}))
    refuse_changed_since(checkpoint.parent, identity_of(config_of(), "d1", model))
    refuse_changed_since(checkpoint.parent / "none", {"run.seed": 5})
    with pytest.raises(UserError, match="step-00000004"):
        refuse_changed_since(checkpoint.parent, {"run.seed": 5})
