"""What a run may not change while it goes on, and how a change is told."""

from __future__ import annotations

import json

import pytest

from slipstream.config.load import build, load_recorded
from slipstream.errors import UserError
from slipstream.learner.checkpoint.identity import (
    ACCEPTED,
    IDENTITY,
    identity_of,
    known_at_start,
    refuse_changed,
    refuse_changed_since,
    settings_of,
)
from slipstream.rewards.source import source_digest


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
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature is 0.5 and was 1.0"),
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
        refuse_changed(
            checkpoint,
            identity_of(config_of(model={"source": "other"}), "d2", model, reference="abc", prompts=90),
        )
    for told in (
        "data set is data.kind arithmetic, 90 prompts and was data.kind arithmetic",
        "reference model (learner.reference.source null) does not hold what it did",
        "tokenizer is model.source other and was model.source smollm2-135m-instruct",
    ):
        assert told in str(caught.value)
    assert "'d2'" not in str(caught.value), "a digest tells nobody anything"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"kind": "arithmetic", "options": {"terms": 3}}, "data.options is {'terms': 3} and was {}"),
        ({"kind": "arithmetic", "limit": 50}, "data.limit is 50 and was None"),
        ({"kind": "arithmetic", "holdout": 8}, "data.holdout is 8 and was 64"),
        ({"kind": "arithmetic", "template": "plain"}, "data.template is 'plain' and was 'chat'"),
        ({"kind": "sort_digits"}, "data.kind is 'sort_digits' and was 'arithmetic'"),
    ],
)
def test_what_makes_the_rows_is_told_by_its_setting_before_they_are_read(checkpoint, data, told):
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, settings_of(config_of(data=data)))
    assert told in str(caught.value)


def test_a_file_of_rows_does_not_count_by_its_place_or_length(checkpoint, tmp_path):
    """Its rows are compared by the learner (tests/prompts/test_known_rows.py), for it may have grown."""

    def of(name, text):
        (tmp_path / name).write_text(text)
        return known_at_start(config_of(data={"kind": "jsonl", "path": str(tmp_path / name)}))

    sealed_with(checkpoint, of("a.jsonl", '{"prompt": "x"}\n'))
    refuse_changed(checkpoint, of("moved.jsonl", '{"prompt": "x"}\n'))
    refuse_changed(checkpoint, of("a.jsonl", '{"prompt": "x"}\n{"prompt": "y"}\n'))


def test_a_reward_s_file_counts_by_its_content_wherever_it_lies(checkpoint, tmp_path):
    def of(folder):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("def score(completion):\n    return 1.0\n")
        use = f"{tmp_path}/{folder}/mine.py:score"
        return known_at_start(config_of(reward={"functions": [{"use": use}]}))

    sealed_with(checkpoint, of("here"))
    refuse_changed(checkpoint, of("there"))


def test_only_the_newest_checkpoint_that_is_sealed_counts(checkpoint, model):
    half = checkpoint.with_name("step-00000009")
    half.mkdir()
    (half / IDENTITY).write_text(json.dumps({"run.seed": 99}))
    refuse_changed_since(checkpoint.parent, identity_of(config_of(), "d1", model))
    refuse_changed_since(checkpoint.parent / "none", {"run.seed": 5})
    with pytest.raises(UserError, match="step-00000004"):
        refuse_changed_since(checkpoint.parent, {"run.seed": 5})


def judged(*functions):
    return settings_of(config_of(reward={"functions": list(functions)}))


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(completion): return 1.0")
    return path


def sealed_with(checkpoint, identity):
    (checkpoint / IDENTITY).write_text(json.dumps(identity))
    return checkpoint


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        ([{"use": "math"}], "reward.functions.0.use is 'math' and was 'last_number'"),
        (
            [{"use": "last_number", "weight": 2.0}],
            "reward.functions.0.weight is 2.0 and was 1.0",
        ),
        (
            [{"use": "last_number", "options": {"answer_column": "gold"}}],
            "reward.functions.0.options is {'answer_column': 'gold'} and was {}",
        ),
        (
            [{"use": "last_number", "on_timeout": "zero"}],
            "reward.functions.0.on_timeout is 'zero' and was None",
        ),
        (
            [{"use": "last_number"}, {"use": "math"}],
            "reward.functions is ['last_number', 'math'] and was ['last_number']",
        ),
    ],
)
def test_another_reward_is_another_run(checkpoint, functions, told):
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, judged(*functions))
    assert told in str(caught.value)
    assert "run.accept='[reward.functions" in str(caught.value)


def test_how_long_a_reward_may_take_is_no_part_of_it(checkpoint):
    refuse_changed(checkpoint, judged({"use": "last_number", "timeout_seconds": 60, "memory_mb": 1024}))


@pytest.mark.parametrize("by_file", [True, False])
def test_other_code_behind_a_reward_is_told(checkpoint, reward_file, by_file, monkeypatch):
    monkeypatch.chdir(reward_file.parent)
    use = {"use": f"{reward_file}:score" if by_file else "mine:score"}
    before = judged(use)
    assert before["reward.functions.0.source"]
    reward_file.write_text("def score(completion): return 0.0")
    with pytest.raises(UserError, match=r"reward\.functions\.0\.source is '"):
        refuse_changed(sealed_with(checkpoint, before), judged(use))


def test_code_that_is_not_on_this_host_is_not_compared(checkpoint, reward_file):
    before = judged({"use": f"{reward_file}:score"})
    reward_file.unlink()
    refuse_changed(sealed_with(checkpoint, before), judged({"use": f"{reward_file}:score"}))


def test_the_code_behind_a_reward_is_found_without_running_it(tmp_path, monkeypatch):
    folder = tmp_path / "judges"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "mine.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    assert source_digest("judges.mine:score") == source_digest(f"{folder / 'mine.py'}:score")
    assert source_digest("judges.none:score") is None
    assert source_digest("math") is None


def test_a_change_of_the_reward_is_taken_by_name_and_written_down(checkpoint):
    now = judged({"use": "last_number", "weight": 2.0})
    taken = refuse_changed(checkpoint, now, ["reward.functions.0.weight"])
    written = {"after step": 4, "name": "reward.functions.0.weight", "was": 1.0, "is": 2.0}
    assert taken == [written]
    sealed_with(checkpoint, now | {ACCEPTED: taken})
    assert refuse_changed(checkpoint, now) == [written]


def test_only_the_change_that_is_named_is_taken(checkpoint):
    now = judged({"use": "last_number", "weight": 2.0, "on_timeout": "zero"})
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, now, ["reward.functions.0.weight"])
    assert "on_timeout is 'zero'" in str(caught.value)
    assert "weight is 2.0" not in str(caught.value)
    assert "run.accept='[reward.functions.0.on_timeout, reward.functions.0.weight]'" in str(caught.value)


def test_what_makes_another_run_cannot_be_accepted(checkpoint):
    with pytest.raises(UserError) as caught:
        refuse_changed(checkpoint, settings_of(config_of(run={"seed": 7})))
    assert "run.accept" not in str(caught.value)
    with pytest.raises(UserError, match=r"run\.accept: 'run\.seed' cannot change"):
        config_of(run={"accept": ["run.seed"]})


def test_what_one_resume_accepted_the_next_asks_again(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {accept: [reward.functions.0.weight]}\ndata: {kind: arithmetic}\n"
        "reward: {functions: [{use: last_number}]}\n"
    )
    assert load_recorded(path)[0].run.accept == []
    assert load_recorded(path, ["run.accept=[reward.functions.0.use]"])[0].run.accept == [
        "reward.functions.0.use"
    ]
