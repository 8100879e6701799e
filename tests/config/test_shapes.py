"""YAML as other tools' configs have it (anchors, merge keys, set-aside sections), and overrides that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slipstream.config.load import load_config, read_tree
from slipstream.config.yaml_loader import parse_yaml
from slipstream.errors import ConfigError, UserError

ANCHORS = """
x-common: &common
  max_new_tokens: 7
  stop_strings: [a]
x-more: &more
  <<: *common
  top_logprobs: 2
sampling:
  <<: *more
  stop_strings: [b]
run: &run {steps: 2}
data: {kind: arithmetic, holdout: 0, template: plain}
reward: {functions: [{use: exact_match}]}
"""


def test_merge_keys_bring_their_values_and_own_ones_win(tmp_path: Path) -> None:
    (tmp_path / "anchors.yaml").write_text(ANCHORS)
    config, _ = load_config(tmp_path / "anchors.yaml", [], {})
    assert config.sampling.max_new_tokens == 7
    assert config.sampling.stop_strings == ["b"]


def test_a_section_that_begins_with_x_is_set_aside_at_the_top_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("x-notes: {run: 1}\nrun: {steps: 1}\n")
    assert read_tree(path) == {"run": {"steps": 1}}
    path.write_text("run: {x-steps: 1}\n")
    assert read_tree(path) == {"run": {"x-steps": 1}}


@pytest.mark.parametrize("text", ["a: 1\na: 2", "b: &b {a: 1}\nc: {<<: *b, d: 1, d: 2}", "l: [{a: 1, a: 1}]"])
def test_a_key_given_twice_is_refused_wherever_it_stands(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="is given twice"):
        parse_yaml(text)


def test_a_mapping_that_merges_and_is_merged_itself_has_each_key_once() -> None:
    text = "z: &z {k: 1, l: 1}\na: &a\n  <<: *z\n  k: 2\nb:\n  <<: [*a, *z]\n  l: 3\n<<: *a"
    assert parse_yaml(text) == {
        "z": {"k": 1, "l": 1},
        "a": {"k": 2, "l": 1},
        "b": {"k": 2, "l": 3},
        "k": 2,
        "l": 1,
    }


def test_a_merge_of_something_else_than_a_mapping_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run:\n  <<: 3\n")
    with pytest.raises(UserError, match="is no YAML"):
        read_tree(tmp_path / "a.yaml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(ANCHORS)
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize("text", ["", "  ", "# nothing"])
def test_an_empty_override_is_refused_and_says_how_null_is_written(file: Path, text: str) -> None:
    for given in (([f"run.steps={text}"], {}), ([], {"SLIPSTREAM__RUN__STEPS": text})):
        with pytest.raises(ConfigError, match=r"run\.steps has an empty value; .*null"):
            load_config(file, *given)


@pytest.mark.parametrize("text", ["null", "~", "Null"])
def test_null_that_is_written_out_is_null(file: Path, text: str) -> None:
    assert load_config(file, [f"run.steps={text}"], {})[0].run.steps is None


def test_an_empty_text_is_written_with_quotes(file: Path) -> None:
    assert load_config(file, ["data.system=''"], {})[0].data.system == ""
