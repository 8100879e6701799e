"""Where settings come from: file, environment, command line, and who wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.algo.settings.recipes import RECIPES
from slipstream.config.load import build, find_config, load_config
from slipstream.config.rules import objective_of, resolved
from slipstream.config.yaml_loader import parse_yaml
from slipstream.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path, usable: Any) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(usable(**{"run.steps": 1, "run.seed": 1, "batch.groups": 1})))
    return path


def test_later_sources_win(file: Path) -> None:
    environment = {"SLIPSTREAM__RUN__SEED": "2", "SLIPSTREAM__BATCH__GROUPS": "2", "OTHER__RUN__STEPS": "7"}
    config, _ = load_config(file, ["batch.groups=3"], environment)
    assert (config.run.steps, config.run.seed, config.batch.groups) == (1, 2, 3)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("learner.optimizer.learning_rate=1e-6", ("learner", "optimizer", "learning_rate"), 1e-6),
        ("learner.optimizer.learning_rate=2E-5", ("learner", "optimizer", "learning_rate"), 2e-5),
        ("run.name=abc", ("run", "name"), "abc"),
        ("run.name='7'", ("run", "name"), "7"),
        ("run.name=null", ("run", "name"), None),
        ("run.strict=true", ("run", "strict"), True),
        ("data.options={digits: 1}", ("data", "options"), {"digits": 1}),
        ("data.template=a=b {prompt}", ("data", "template"), "a=b {prompt}"),
        (" run.steps =5", ("run", "steps"), 5),
        ("model.source=a:b", ("model", "source"), "a:b"),
        ("objective.clip_high=null", ("objective", "clip_high"), None),
    ],
)
def test_an_override_is_yaml(file: Path, override: str, path: tuple[str, ...], value: object) -> None:
    """Case 105: the command line."""
    found: Any = load_config(file, [override], {})[0]
    for key in path:
        found = getattr(found, key)
    assert found == value


def test_lists_are_indexed_by_number(file: Path) -> None:
    config, _ = load_config(
        file,
        ["reward.functions.0.use=math", "reward.functions.0.options.a.b=1"],
        {"SLIPSTREAM__REWARD__FUNCTIONS__0__WEIGHT": "2"},
    )
    (function,) = config.reward.functions
    assert (function.use, function.weight, function.options) == ("math", 2, {"a": {"b": 1}})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("nonsense", "nonsense has no '='"),
        ("run.steps.more=1", "run.steps.more runs through a plain value"),
        ("run.steps.much.more=1", "no place in the config at 'much'"),
        ("reward.functions.1.use=math", "no place in the config at '1'"),
        ("reward.functions.-1.use=math", "no place in the config at '-1'"),
        ("reward.functions.first.use=math", "no place in the config at 'first'"),
        ("run.name=[", "the value of run.name is no YAML"),
        ("run.stps=3", "run.stps: unknown setting; did you mean run.steps? (from the command line)"),
        ("learner.optimzer.eps=1", "learner.optimzer: unknown setting; did you mean learner.optimizer?"),
        ("learner.learning-rate=1", "did you mean learner.optimizer.learning_rate?"),
        ("run.steps=many", "run.steps: should be a valid integer (got 'many') (from the command line)"),
        ("=3", "unknown setting"),
    ],
)
def test_a_wrong_override_is_named(file: Path, override: str, says: str) -> None:
    """Case 105."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override], {})
    assert len(caught.value.problems) == 1
    assert says in caught.value.problems[0]


def test_a_wrong_variable_is_named(file: Path) -> None:
    """Case 105: the environment."""
    environment = {"SLIPSTREAM__LEARNER__LEARNING_RTE": "1", "SLIPSTREAM__RUN__STEPS": "x"}
    with pytest.raises(ConfigError) as caught:
        load_config(file, [], environment)
    text = str(caught.value)
    assert "learner.learning_rte: unknown setting; did you mean learner.optimizer.learning_rate?" in text
    assert "(from SLIPSTREAM__LEARNER__LEARNING_RTE)" in text
    assert "(from SLIPSTREAM__RUN__STEPS)" in text


def test_wrong_overrides_and_a_wrong_file_come_at_once(file: Path) -> None:
    file.write_text(file.read_text() + "stalenes: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["nonsense", "run.name=[", "batch.group_size=1"], {})
    assert len(caught.value.problems) == 4


def test_the_password_is_no_setting(file: Path) -> None:
    config, _ = load_config(file, [], {"SLIPSTREAM_REDIS_PASSWORD": "hunter2"})
    assert "hunter2" not in config.model_dump_json()


def test_an_override_that_cannot_be_read_is_not_repeated(file: Path) -> None:
    """It may be a secret in the wrong place."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["redis.url=[hunter2"], {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-1E+3", -1000.0),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("1.0", 1.0),
        ("12", 12),
        ("1_000", 1000),
        ("'1e-6'", "1e-6"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1e-6x", "1e-6x"),
        ("v1e5", "v1e5"),
        ("", None),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: object) -> None:
    """YAML 1.1 takes 1e-6 for a text; that slip costs people a day."""
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


def test_packaged_configs_go_by_name() -> None:
    assert find_config("smollm2-sums") == find_config("smollm2-sums.yaml")
    assert find_config("smollm2-sums").name == "smollm2-sums.yaml"


def test_a_file_here_comes_before_a_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-sorter.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_config("tiny-sorter.yaml").resolve() == tmp_path / "tiny-sorter.yaml"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_resolved_config_loads_as_itself(recipe: str, usable: Any) -> None:
    """A run's folder keeps the resolved config, and every role reads it: no recipe may lose its values there."""
    needs = {"dr_grpo": {"horizon": 256}, "centred": None, "gdpo": None}.get(recipe, {})
    if needs is None:
        pytest.skip("asks for more than this config has")
    config, _ = build(
        usable(
            objective={"recipe": recipe, **needs},
            batch={"group_size": RECIPES[recipe].group_size or 8},
            **{"learner.optimizer.learning_rate": 1e-6},
        )
    )
    again, _ = build(parse_yaml(yaml.safe_dump(resolved(config), sort_keys=False)))
    assert objective_of(again) == objective_of(config)
    assert again.model_dump(exclude={"objective"}) == config.model_dump(exclude={"objective"})
    assert resolved(again) == resolved(config)


def test_a_recipe_brings_its_values_and_the_config_overrides_them(usable: Any) -> None:
    config, _ = build(usable(objective={"recipe": "dapo", "clip_low": None}))
    objective = objective_of(config)
    assert (objective.clip_low, objective.clip_high) == (None, 0.28)


@pytest.mark.parametrize("written", ["027", '"027"', "27", "0027"])
def test_a_umask_is_what_was_written_however_yaml_reads_it(tmp_path: Path, written: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{umask: {written}}}\ndata: {{kind: arithmetic}}\nreward: {{functions: [{{use: last_number}}]}}\n"
    )
    assert load_config(file, [])[0].run.umask == "027"
