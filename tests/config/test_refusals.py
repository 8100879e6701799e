"""What a config refuses, and how it says so: every problem at once, each with its path and its mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import rules_learner
from slipstream.config.aliases import ALIASES
from slipstream.config.explain import setting_paths
from slipstream.config.load import build, find_config, load_config, load_recorded
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, UserError


def refused(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(tree)
    return caught.value.problems


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("learner.optimizer.learning_rte", "learner.optimizer.learning_rate"),
        ("learner.learning_rte", "learner.optimizer.learning_rate"),  # a slip, and the wrong level
        ("learner.learning_rate", "learner.optimizer.learning_rate"),  # the right key at the wrong level
        ("learner.optimizer.learning-rate", "learner.optimizer.learning_rate"),  # dash for underscore
        ("batch.group-size", "batch.group_size"),
        ("max_staleness", "staleness.max_staleness"),
        ("optimizer", "learner.optimizer"),
        ("lerner", "learner"),
        ("staleness.eta", "staleness.max_staleness"),
        ("staleness.max_off_policy", "staleness.max_staleness"),
        ("learner.optimizer.lr", "learner.optimizer.learning_rate"),
        ("lr", "learner.optimizer.learning_rate"),
        ("G", "batch.group_size"),
        ("batch.num_generations", "batch.group_size"),
        ("objective.kl_coef", "objective.kl_beta"),
        ("rollout.temperature", "sampling.temperature"),
        ("rollout.engine.temperature", "sampling.temperature"),
        ("sampling.max_completion_length", "sampling.max_new_tokens"),
        ("reward.weight", "reward.functions.0.weight"),
    ],
)
def test_an_unknown_key_is_named_with_what_was_meant(path: str, meant: str, usable: Any) -> None:
    """Case 105."""
    problems = refused(usable(**{path: 1}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}: unknown setting; did you mean ")
    assert meant in problems[0].removesuffix("?").partition("did you mean ")[2].split(" or ")


def test_an_unknown_key_inside_a_named_entry_or_a_list_is_found(usable: Any) -> None:
    tree = usable(**{"evaluation.sets.hard.kind": "arithmetic", "evaluation.sets.hard.limits": 1})
    tree["reward"]["functions"][0]["timeout_second"] = 1
    assert refused(tree) == [
        "evaluation.sets.hard.limits: unknown setting; did you mean evaluation.sets.hard.limit?",
        "reward.functions.0.timeout_second: unknown setting; did you mean reward.functions.0.timeout_seconds?",
    ]


@pytest.mark.parametrize("path", ["staleness.foo", "learner.optimizer.zzz", "xyz", "reward.cat"])
def test_nothing_far_fetched_is_suggested(path: str, usable: Any) -> None:
    (problem,) = refused(usable(**{path: 1}))
    assert "did you mean" not in problem
    assert "known here: " in problem


def test_a_large_section_is_not_listed(usable: Any) -> None:
    (problem,) = refused(usable(**{"objective.qqqqq": 1}))
    assert "docs/config.md" in problem
    assert len(problem) < 120


def test_names_of_other_projects_lead_to_settings_that_exist() -> None:
    known = set(setting_paths(Config))
    assert {path for paths in ALIASES.values() for path in paths} <= known
    assert not set(ALIASES) & {path.rpartition(".")[2] for path in known}, "an alias hides a real name"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "learner.optimizer.learning_rate",
            "1e-6",
            "should be a valid number (got '1e-6'); in quotes it is a text",
        ),
        ("learner.optimizer.learning_rate", float("inf"), "finite number (got inf)"),
        ("learner.optimizer.weight_decay", float("nan"), "finite number (got nan)"),
        ("learner.optimizer.learning_rate", 0, "greater than 0"),
        ("learner.checkpoint.keep_last", 1, "greater than or equal to 2"),  # one may be damaged
        ("learner.checkpoint.keep_optimizer_last", 1, "greater than or equal to 2"),
        ("batch.group_size", 8.0, "valid integer"),
        ("batch.group_size", True, "valid integer"),
        ("run.strict", 1, "valid boolean"),
        ("run.name", 2024, "put it in quotes"),
        ("staleness.policy", "pase", "'pace', 'drop', 'wait' or 'token' (got 'pase')"),
        ("objective.recipe", "grop", "nearest: grpo"),
        ("objective.aggregation", "mean", "should be 'token_mean'"),
        ("run", None, "should be a section but holds nothing"),
        ("run", "fast", "should be a section but holds 'fast'"),
        ("run", [1], "should be a section but holds a list"),
        ("reward.functions", {"use": "math"}, "valid list"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path: str, value: object, says: str, usable: Any) -> None:
    """Case 107: "1e-6" as a string, and its like."""
    problems = refused(usable(**{path: value}))
    assert len(problems) == 1
    assert problems[0].startswith(path.partition(".")[0])
    assert says in problems[0]


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"objective.proximal": "none", "staleness.max_staleness": 1}, ["max_staleness 1", "correction"]),
        ({"batch.group_size": 1}, ["objective.advantage grpo", "batch.group_size is 1"]),
        ({"sampling.temperature": 0.0}, ["temperature 0"]),
        ({"objective.recipe": "dr_grpo"}, ["fixed_length", "horizon"]),
        ({"objective.recipe": "gdpo"}, ["gdpo", "reward components"]),
        (
            {"objective.loss": "vespo", "objective.correction": "tis"},
            ["objective.correction tis", "loss vespo", "set objective.correction: none"],
        ),
        ({"objective.kl_beta": 0.1}, ["objective.kl_beta 0.1", "reference"]),
        ({"objective.kl_coeff_clamp": 5.0}, ["objective.kl_coeff_clamp 5.0", "objective.kl_beta 0"]),
        (
            {"objective.correction": "tis"},
            ["objective.correction tis", "proximal sampler corrects twice", "objective.correction: none"],
        ),
        ({"sampling.min_new_tokens": 500}, ["sampling.min_new_tokens", "sampling.max_new_tokens"]),
        ({"model.context_length": 8, "sampling.min_new_tokens": 8}, ["min_new_tokens", "model.context_length"]),
        ({"rollout.engine.max_sequences": 4}, ["rollout.engine.max_sequences (4)", "batch.group_size (8)"]),
        ({"learner.optimizer.schedule": "cosine"}, ["learner.optimizer.schedule cosine", "run.steps"]),
        ({"learner.n_mini": 3}, ["learner.n_mini 3", "batch.groups 8"]),
        (
            {"learner.parallel.ranks": 3, "learner.parallel.replicate": 2},
            ["learner.parallel.replicate 2", "learner.parallel.ranks 3"],
        ),
        (
            {"learner.optimizer.kind": "muon", "learner.parallel.cpu_offload": True},
            ["learner.optimizer.kind muon", "learner.parallel.cpu_offload"],
        ),
        ({"learner.precision.param": "float16"}, ["learner.precision.param", "bfloat16"]),
        ({"data.kind": "jsonl"}, ["data.path", "kind jsonl"]),
        ({"data.kind": "reasoning_gym"}, ["data.name", "kind reasoning_gym"]),
        ({"evaluation.sets.hard.kind": "huggingface"}, ["evaluation.sets.hard.path", "huggingface"]),
        ({"reward.functions": []}, ["reward.functions", "no reward"]),
        ({"reward.functions": [{"use": "math"}, {"use": "math"}]}, ["reward.functions", "same name"]),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    changes: dict[str, Any], both: list[str], usable: Any
) -> None:
    """Case 107."""
    problems = refused(usable(**changes))
    assert len(problems) == 1
    for name in both:
        assert name in problems[0]


def test_all_problems_come_at_once(usable: Any) -> None:
    tree = usable(
        **{
            "run.stps": 3,
            "learner.optimizer.learning_rate": "1e-6",
            "staleness.policy": "never",
            "batch.group_size": 1,
            "redis.url": "redis://:hunter2@host/0",
        }
    )
    text = "\n".join(refused(tree))
    for found in (
        "run.stps",
        "learning_rate",
        "staleness.policy",
        "group_size is 1",
        "SLIPSTREAM_REDIS_PASSWORD",
    ):
        assert found in text
    assert "hunter2" not in text


def test_a_wrong_value_is_not_reported_twice(usable: Any) -> None:
    """What the default of a wrongly typed setting would contradict is not the user's doing."""
    tree = usable(**{"batch.group_size": "2", "rollout.engine.max_sequences": 4})
    assert len(refused(tree)) == 1


def test_warnings_are_errors_only_when_strict(usable: Any) -> None:
    odd = {"batch.group_size": 2}
    _, warnings = build(usable(**odd))
    assert len(warnings) == 1
    assert "group_size 2" in warnings[0]
    assert refused(usable(**odd, **{"run.strict": True})) == warnings


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:6379/0",
        "redis://user:hunter2@host/0",
        "rediss://:hunter2@host/0",
        "unix://:hunter2@/tmp/redis.sock",
        "redis://host/0?password=hunter2",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str, usable: Any) -> None:
    (problem,) = refused(usable(**{"redis.url": url}))
    assert "hunter2" not in problem
    assert "SLIPSTREAM_REDIS_PASSWORD" in problem


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "redis://user@host", "unix:///tmp/redis.sock", "rediss://h"]
)
def test_urls_without_a_password_are_taken(url: str, usable: Any) -> None:
    config, _ = build(usable(**{"redis.url": url}))
    assert config.redis.url == url


@pytest.mark.parametrize("url", ["http://host", "host:6379", "redis://[::1"])
def test_what_is_no_redis_url_is_refused(url: str, usable: Any) -> None:
    (problem,) = refused(usable(**{"redis.url": url}))
    assert problem.startswith("redis.url: ")


def test_a_secret_among_free_options_is_refused(usable: Any) -> None:
    options = {"api_key": "sk-hunter2", "stop_token": "x", "password_field": "y"}
    (problem,) = refused(usable(**{"reward.functions": [{"use": "math", "options": options}]}))
    assert problem.startswith("reward.functions.0.options.api_key: looks like a secret")
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"run: [1,\n", "is no YAML"),
        (b"run:\n\tsteps: 1\n", "line 2"),
        (b"run: {steps: 1}\nrun: {seed: 1}\n", "'run' is given twice"),
        (b"run: {steps: 1, steps: 2}\n", "'steps' is given twice"),
        (b"- a\n- b\n", "holds a list"),
        (b"just text\n", "holds a str"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"run: !!python/object/apply:os.system ['true']\n", "is no YAML"),
        (b"a: 1\n---\nb: 2\n", "is no YAML"),
        (b"? [a]\n: 1\n", "is no YAML"),
        (b"run: \x00\n", "is no YAML"),
        (b"run: {steps: " + b"[" * 3000, "is no YAML"),
        (b"run: {name: 2024-13-45}\n", "is no YAML"),
        (b"1: 2\n", "1: a key must be a text"),
    ],
)
def test_a_file_that_is_no_config_is_one_clear_message(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "broken.yaml" in str(caught.value)
    assert says in str(caught.value)


def test_an_empty_file_has_only_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["reward.functions", "data.path"]


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="directory"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "x" * 300, "/nowhere/smollm2-sums.yaml", "./smollm2-sums"])
def test_a_missing_file_names_those_that_come_along(name: str) -> None:
    """A path is a path: it is never replaced by a packaged config that happens to have its name."""
    with pytest.raises(UserError, match="smollm2-sums, smollm2-sums-lora, tiny-sorter"):
        find_config(name)


def test_a_recorded_config_with_settings_of_another_version_is_one_line_with_the_mend(
    tmp_path: Path, usable: Any
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(usable(**{"batch.size": 4, "learner.optimizer.lr": 1e-5, "batch.groups": 0}))
    )
    with pytest.raises(UserError) as caught:
        load_recorded(path)
    text = str(caught.value)
    assert text.startswith(f"{path} was recorded by another version of slipstream; unknown here: batch.size")
    assert "learner.optimizer.lr (did you mean learner.optimizer.learning_rate?)" in text
    assert text.endswith("; delete or rename these keys in that file")
    assert "\n" not in text
    path.write_text(yaml.safe_dump(usable()))
    with pytest.raises(ConfigError, match=r"batch\.size: unknown setting.*the command line"):
        load_recorded(path, ["batch.size=4"])


@pytest.mark.parametrize(
    ("changes", "there", "said"),
    [
        ({"device": "cpu"}, False, 1),
        ({"device": "auto"}, False, 1),
        ({"device": "cpu"}, True, 0),
        ({"device": "cuda"}, False, 0),
        ({"device": "cpu", "compile": False}, False, 0),
    ],
)
def test_compiling_on_a_cpu_needs_a_compiler(
    usable: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], there: bool, said: int
) -> None:
    monkeypatch.setattr(rules_learner, "_GPUS", ())
    monkeypatch.setattr(rules_learner.shutil, "which", lambda name: name if there else None)
    _, warned = build(usable(learner={"compile": True, **changes}))
    assert [line.partition(":")[0] for line in warned] == ["learner.compile"] * said
