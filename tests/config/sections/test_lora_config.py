"""What `learner.lora` refuses, each by its setting."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from slipstream.config.load import build
from slipstream.config.sections.lora_config import LoraSection, missing
from slipstream.errors import ConfigError, install

DROPOUT = {"learner.lora.rank": 8, "learner.lora.dropout": 0.1}
WITHOUT_RATIOS = {"objective.recipe": "rloo", "objective.correction": "none", "staleness.max_staleness": 0}


def problems(tree: dict[str, Any]) -> list[str]:
    try:
        build(tree)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_is_at_least_one(rank: int, usable: Any) -> None:
    assert "learner.lora.rank" in " ".join(problems(usable(**{"learner.lora.rank": rank})))


def test_dropout_is_refused_where_it_breaks_ratios(usable: Any) -> None:
    assert not problems(usable(**DROPOUT, **WITHOUT_RATIOS))
    for more in ({}, {**WITHOUT_RATIOS, "objective.correction": "tis"}, {"objective.recipe": "decoupled_ppo"}):
        (line,) = problems(usable(**DROPOUT, **more))
        assert line.startswith("learner.lora.dropout 0.1")


def test_options_without_a_rank_are_warned_of(usable: Any) -> None:
    (line,) = build(usable(**{"learner.lora.targets": ["q_proj"]}))[1]
    assert line.startswith("learner.lora.targets ['q_proj'] has no effect: it acts with learner.lora.rank set")


def test_a_target_named_twice_is_refused(usable: Any) -> None:
    (line,) = problems(usable(**{"learner.lora.rank": 1, "learner.lora.targets": ["q_proj", "q_proj"]}))
    assert "q_proj stands there twice" in line


@pytest.mark.parametrize(
    ("more", "scale"), [({}, 2.0), ({"alpha": 8.0}, 2.0), ({"alpha": 8.0, "rslora": True}, 4.0)]
)
def test_scale(more: dict[str, Any], scale: float) -> None:
    assert LoraSection(rank=4, **more).scale == scale


def test_a_missing_peft_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing(LoraSection(rank=1))[0].endswith(install("lora"))
    assert missing(LoraSection()) == []
