"""`plan`: what it predicts from given numbers and from a run, and what it says where a number is missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.algo import logprobs
from slipstream.cli.main import main
from slipstream.cli.plan import plan_memory
from slipstream.cli.plan.plan import suggest
from slipstream.cli.plan.plan_memory import Sizes, learner_memory, replica_memory
from slipstream.cli.plan.plan_numbers import for_config, from_run, lognormal
from slipstream.cli.plan.simulation import Pipeline, simulate
from slipstream.config.load import build
from slipstream.errors import UserError

GIVEN = ["--mean-length", "40", "--sigma", "0.5", "--tokens-per-second", "1000", "--step-seconds", "2"]
TREE = {"data": {"kind": "arithmetic"}, "reward": {"functions": [{"use": "last_number"}]}}
SMOLLM2 = Sizes(
    parameters=134_515_008, layers=30, hidden=576, feed_forward=1536, keys_values=384, vocabulary=49152,
    per_rank=30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)),
)  # fmt: skip


def steps_of(pipeline, seconds, load, count=20):
    """Lines of steps.jsonl as a run of this pipeline writes them."""
    tokens = pipeline.groups * pipeline.group_size * sum(pipeline.lengths) / len(pipeline.lengths)
    counts = [0] * 24
    for length in pipeline.lengths:
        counts[length * 24 // 49] += 1
    line = {
        "seconds": seconds, "tokens": tokens, "load": {"generate": load}, "stages": {"sync": 0.3},
        "parts": {"wait": seconds - pipeline.step_seconds}, "score_seconds": 0.1, "longest": 48, "lengths": counts,
    }  # fmt: skip
    start = line | {"seconds": 100.0}
    return [start] * 5 + [line] * count


@pytest.fixture
def pipeline():
    return Pipeline(
        lengths=lognormal(20, 0.5, 48), groups=4, group_size=2, replicas=2, slots=8, token_seconds=0.05, floor=0.3,
        step_seconds=1.5,
    )  # fmt: skip


def test_given_numbers_are_enough(capsys, clean_environment):
    assert main(["plan", "tiny-sorter", *GIVEN, "--bandwidth", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "given numbers"
    assert found["stages"]["train"] == 2.0
    assert found["bottleneck"] in ("generate", "train")
    assert found["steps_per_hour"] == pytest.approx(3600 / found["costs"]["step_seconds"])
    assert found["costs"]["step_seconds"] >= 0.999 * max(found["stages"].values())


def test_the_lines_say_what_a_person_asks(capsys, clean_environment):
    assert main(["plan", "tiny-sorter", "staleness.max_staleness=1", *GIVEN]) == 0
    text = capsys.readouterr().out
    for part in (
        "the limit is train",
        "steps an hour",
        "of the limit",
        "versions on average",
        "rollout.replicas=",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a plan needs --mean-length; give it, or the folder of a run"),
        (GIVEN[:-2], "a plan needs --step-seconds"),
        (["--from", "nowhere"], "nowhere holds no run"),
    ],
)
def test_a_missing_number_is_named_with_the_way_out(arguments, said, capsys, clean_environment):
    assert main(["plan", "tiny-sorter", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--sigma", "wide"), ("--decode-floor", "2"), ("--bandwidth", "0")]
)
def test_a_number_that_is_none_is_refused_by_its_option(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny-sorter", *GIVEN, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {value!r} is not a number" in capsys.readouterr().err


def test_a_run_gives_back_the_pipeline_that_made_its_steps(pipeline):
    config = build(TREE | {"batch": {"groups": 4, "group_size": 2}, "rollout": {
        "replicas": 2, "engine": {"max_sequences": 8}}})[0]  # fmt: skip
    load = 0.75
    tokens = 8 * sum(pipeline.lengths) / len(pipeline.lengths)
    seconds = tokens * pipeline.decode_seconds(6) / (2 * 6)  # six of eight slots in use, all the time
    found = from_run(config, steps_of(pipeline, seconds, load), floor=0.3)
    assert found.token_seconds == pytest.approx(pipeline.token_seconds)
    assert found.step_seconds == pytest.approx(1.5)
    assert (found.score_seconds, found.sync_seconds) == (pytest.approx(0.1), pytest.approx(0.3))
    assert sum(found.lengths) / len(found.lengths) == pytest.approx(tokens / 8, rel=0.02)
    with pytest.raises(UserError, match="4 steps after its start"):
        from_run(config, steps_of(pipeline, seconds, load, count=4))


def test_the_demo_s_steps_an_hour_waits_and_ages_are_predicted(tmp_path, capsys, clean_environment):
    """44 steps of `make demo`'s job as they were recorded; what the prediction is made from are the stages alone."""
    recorded = Path(__file__).with_name("recorded") / "smollm2-sums.jsonl"
    shutil.copy(Path(__file__).parents[3] / "configs" / "smollm2-sums.yaml", tmp_path / "config.yaml")
    shutil.copy(recorded, tmp_path / "steps.jsonl")
    assert main(["plan", "smollm2-sums", "--from", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [json.loads(line) for line in recorded.read_text().splitlines()][5:]
    seconds = sum(step["seconds"] for step in steps)
    assert found["steps_per_hour"] == pytest.approx(3600 * len(steps) / seconds, rel=0.15)
    assert found["costs"]["waited"] == pytest.approx(sum(s["parts"]["wait"] for s in steps) / seconds, abs=0.05)
    assert found["costs"]["age_mean"] == pytest.approx(sum(s["age_mean"] for s in steps) / len(steps), abs=0.3)
    assert found["bottleneck"] == "generate"


def test_another_config_changes_sizes_and_the_learner_s_time_with_them(pipeline):
    config = build(TREE | {"batch": {"groups": 8, "group_size": 4}, "staleness": {"max_staleness": 1}, "rollout": {
        "replicas": 3, "engine": {"max_sequences": 4}}})[0]  # fmt: skip
    other = for_config(config, pipeline)
    assert (other.groups, other.group_size, other.replicas, other.slots, other.eta) == (8, 4, 3, 4, 1)
    assert other.step_seconds == 6.0
    assert other.token_seconds == pytest.approx(0.05 * (0.3 + 0.7 / 2))


def test_it_suggests_the_fewest_replicas_and_the_smallest_bound_that_keep_the_learner_busy(pipeline):
    slow = replace(
        pipeline, replicas=1, step_seconds=pipeline.stages["generate"] * 2 / 3
    )  # one makes a third of it
    better, costs = suggest(slow)
    assert 3 <= better.replicas <= 4
    assert 1 <= better.eta < slow.eta
    assert costs.step_seconds == pytest.approx(slow.step_seconds, rel=0.06)
    assert simulate(slow).step_seconds > 2 * costs.step_seconds


def test_memory_of_a_rank_is_near_what_was_measured():
    """SmolLM2-135M, float32, AdamW, 8 x 128 tokens a pass: a peak of 3.5 GiB was measured without slipstream."""
    config = build(TREE | {"learner": {"micro_batch_tokens": 1024}})[0]
    held = learner_memory(config, SMOLLM2)
    training = sum(held[name] for name in ("weights", "gradients", "moments", "activations"))
    assert training / 2**30 == pytest.approx(3.5, rel=0.1)
    assert held["published"] == 2 * held["weights"]


def test_ranks_share_and_adapters_shrink_what_is_trained():
    config = build(TREE | {"learner": {"parallel": {"ranks": 4, "replicate": 2}}})[0]
    assert learner_memory(config, SMOLLM2)["moments"] == 134_515_008 * 8 // 2
    adapted = build(TREE | {"learner": {"lora": {"rank": 8}}})[0]
    held = learner_memory(adapted, SMOLLM2)
    assert held["weights"] == 134_515_008 * 4
    assert held["gradients"] == 8 * SMOLLM2.per_rank * 4 < held["weights"] / 20


def test_a_reference_is_a_second_model_unless_the_adapters_base_is_one():
    kl = {"objective": {"kl_beta": 0.1}}
    for lora, offload, held in ((None, False, 134_515_008 * 4), (None, True, 0), (8, False, 0)):
        reference = {"source": "start", "offload": offload}
        config = build(TREE | kl | {"learner": {"reference": reference, "lora": {"rank": lora}}})[0]
        assert learner_memory(config, SMOLLM2).get("reference", 0) == held


def test_memory_of_a_replica_is_two_versions_and_a_full_cache():
    config = build(TREE | {"sampling": {"max_new_tokens": 100}, "rollout": {"engine": {"max_sequences": 16}}})[
        0
    ]
    held = replica_memory(config, SMOLLM2, 28)
    assert held == {"weights": 2 * 134_515_008 * 4, "cache": 16 * 128 * 30 * 384 * 4}


def test_the_sizes_of_a_folder_are_those_of_its_tensors(tmp_path):
    shapes = {
        "model.embed_tokens.weight": (40, 32), "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,),
    }  # fmt: skip
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    config = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 40,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Sizes.of(tmp_path)
    assert found.parameters == 40 * 32 + 16 * 32 + 64 * 32 + 32
    assert found.per_rank == 16 + 32 + 64 + 32
    assert (found.layers, found.hidden, found.feed_forward, found.keys_values) == (1, 32, 64, 2 * 2 * 8)


def test_the_head_s_memory_is_what_the_learner_allows_it():
    assert plan_memory.LOGITS_BYTES == logprobs.KEEP_BYTES + logprobs.CHUNK_BYTES


def busy_run(pipeline):
    """A config, and steps of a run of it that was busy."""
    config = build(TREE | {"batch": {"groups": 4, "group_size": 2}, "rollout": {
        "replicas": 2, "engine": {"max_sequences": 8}}})[0]  # fmt: skip
    return config, steps_of(pipeline, 4.0, 0.75)


@pytest.mark.parametrize(
    "changes",
    [{"load": {"generate": 0.0}}, {"tokens": 0}, {"lengths": [0] * 24}],
    ids=["load", "tokens", "lengths"],
)
def test_a_run_that_sampled_nothing_is_refused_in_a_line(pipeline, changes):
    config, steps = busy_run(pipeline)
    with pytest.raises(UserError, match="sampled nothing after its start; plan from one whose generators"):
        from_run(config, [step | changes for step in steps])


@pytest.mark.parametrize("name", ["load", "stages", "parts", "score_seconds", "longest", "lengths", "tokens"])
def test_steps_that_do_not_tell_all_are_left_out_and_not_counted(pipeline, name):
    config, steps = busy_run(pipeline)
    bare = {key: value for key, value in steps[-1].items() if key != name}
    assert from_run(config, [*steps, bare]) == from_run(config, steps)
    with pytest.raises(UserError, match="4 steps after its start"):
        from_run(config, [*steps[:9], *[bare] * 4])


def test_the_replicas_that_ran_count_and_not_those_of_the_config(pipeline):
    config, steps = busy_run(pipeline)
    twice = from_run(config, [step | {"replicas": 4} for step in steps])
    assert twice.replicas == 4
    assert twice.token_seconds == pytest.approx(2 * from_run(config, steps).token_seconds)


@pytest.fixture
def folder(tmp_path):
    """A model folder with one matrix of 16 x 32 and 512 more parameters."""
    tensors = {"model.embed_tokens.weight": (16, 32), "model.layers.0.mlp.up_proj.weight": (16, 32)}
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "model.safetensors"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ([], 1024 * 4),
        (["learner.precision.transfer=bfloat16"], 1024 * 2),
        (["learner.lora.rank=2"], 2 * (16 + 32) * 4),
    ],
)
def test_the_link_carries_what_is_published(changes, size, folder, capsys, clean_environment):
    words = [
        "plan",
        "tiny-sorter",
        f"model.source={folder}",
        *changes,
        *GIVEN,
        "--bandwidth",
        "0.001",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"]["sync"] == pytest.approx(size / 1000)
    assert found["learner_bytes"]["published"] == 2 * size


@pytest.mark.parametrize(
    "text", ['{"n_embd": 32, "n_layer": 1}', "{", "[]", '{"hidden_size": 32, "num_attention_heads": 0}']
)
def test_a_model_that_does_not_tell_its_sizes_is_planned_without_its_memory(
    text, folder, capsys, clean_environment
):
    (folder / "config.json").write_text(text)
    assert main(["plan", "tiny-sorter", f"model.source={folder}", *GIVEN, "--bandwidth", "100"]) == 0
    said = capsys.readouterr().out
    assert f"{folder / 'config.json'} does not tell the model's sizes; so --bandwidth is left out" in said
    assert "steps an hour" in said
