"""Nothing is accepted without effect: a setting acts always, or says under which choice and is warned of without."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.algo.settings.recipes import RECIPES
from slipstream.conditions import Atom, Condition, like, unless, unlike, when
from slipstream.config.base import Section
from slipstream.config.load import build
from slipstream.config.rules import objective_of, resolved
from slipstream.config.schema import Config
from slipstream.config.without_effect import condition_of, idle_settings
from slipstream.errors import ConfigError

# Whoever adds a setting says there that it acts whatever the rest of the config is, or gives it a condition.
ALWAYS = set((Path(__file__).parent / "always.txt").read_text(encoding="utf-8").split())
Assignments = dict[str, Any]


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every plain setting by its path; entries of a list stand at 0, those of a table under NAME."""
    for name, field in model.model_fields.items():
        path, kind = f"{prefix}{name}", field.annotation
        inner = (get_args(kind) or (kind,))[-1]
        if isinstance(inner, type) and issubclass(inner, Section):
            place = {list: ".0", dict: ".NAME"}.get(get_origin(kind), "")  # type: ignore[arg-type]
            yield from walk(inner, f"{path}{place}.")
        else:
            yield path, field


FIELDS = dict(walk(Config))
CONDITIONS = {
    path: condition for path, field in FIELDS.items() if (condition := condition_of(field)) is not None
}


def test_every_setting_acts_always_or_says_under_which_choice() -> None:
    named = {
        name
        for name in FIELDS
        if "sets" not in name.partition(".")[2] or name.startswith("evaluation.sets.NAME")
    }
    assert ALWAYS & set(CONDITIONS) == set()
    assert named - set(CONDITIONS) - ALWAYS == set()
    assert ALWAYS - named == set(), "no such setting"


def test_every_setting_is_read_somewhere() -> None:
    root = Path(__file__).parents[2]
    read: set[str] = set()
    for path in [*root.glob("common/slipstream/**/*.py"), *root.glob("services/slipstream/**/*.py")]:
        if path.name in ("schema.py", "services.py", "data.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    assert {path for path in FIELDS if path.rpartition(".")[2] not in read} == set()


def other(path: str, field: FieldInfo) -> Any:
    """A value that is allowed and not the default."""
    default, kind = field.get_default(call_default_factory=True), field.annotation
    choices = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    if get_origin(kind) is Literal or get_origin(choices[0]) is Literal:
        return next(each for each in get_args(choices[0]) or choices if each != default)
    if kind is bool:
        return not default
    if choices[0] in (int, float):
        at_most = [each.le for each in field.metadata if isinstance(each, annotated_types.Le)]
        at_most += [each.lt - 0.01 for each in field.metadata if isinstance(each, annotated_types.Lt)]
        larger = (default or 1) * 2 + 64
        return choices[0](min([larger, *at_most]) if default not in at_most else at_most[0] / 2)
    return {str: "x", list: ["x"], dict: {"x": 1}}[
        get_origin(kind) if get_origin(kind) in (list, dict) else choices[0]
    ]


def full(name: str, here: str) -> str:
    return name if "." in name else f"{here}.{name}"


def settled(condition: Condition, here: str, wanted: bool) -> Assignments:
    """Settings under which the condition holds, or does not."""
    if not isinstance(condition, Atom):
        parts, every = condition.parts, condition.every  # type: ignore[attr-defined]
        if every == wanted:
            return {name: value for part in parts for name, value in settled(part, here, wanted).items()}
        return settled(parts[0], here, wanted)
    name, inside = full(condition.name, here), condition.wanted == wanted
    if condition.pattern is not None:
        samples = [
            "x.py:f",
            "last_number",
            "python",
            "dppo_topk_tv",
            "dppo_tv",
            "clip",
            "k3_weighted",
            "k3",
            "a/b",
            "a.jsonl",
        ]
        fits = [
            each
            for each in samples
            if like("x", condition.pattern, "").holds(dict.fromkeys("x", each).get) == inside
        ]
        known = get_args(FIELDS[name].annotation) if name in FIELDS else ()
        value = next(each for each in fits if not known or each in known)
        return {name.replace("*", "0"): value}
    if name not in FIELDS:
        return {"evaluation.sets.hard.kind": "arithmetic"} if not inside else {}
    if inside:
        return {name: condition.values[0]}
    known = [each for each in get_args(FIELDS[name].annotation) if isinstance(each, str)]
    if known:
        return {name: next(each for each in known if each not in condition.values)}
    default = FIELDS[name].get_default(call_default_factory=True)
    return {name: default if default not in condition.values else other(name, FIELDS[name])}


def config_with(changes: Assignments) -> Config:
    tree: dict[str, Any] = {"data": {"kind": "arithmetic"}, "reward": {"functions": [{"use": "last_number"}]}}
    for path, value in changes.items():
        *parents, key = path.replace("NAME", "hard").split(".")
        node: Any = tree
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        node[key] = value
    return Config.model_validate(tree)


@pytest.mark.parametrize("path", CONDITIONS)
def test_a_chosen_value_that_cannot_act_is_told_with_what_would_let_it_act(path: str) -> None:
    condition, here = CONDITIONS[path], path.rpartition(".")[0]
    value, place = other(path, FIELDS[path]), path.replace("NAME", "hard")
    config = config_with({**settled(condition, here, False), path: value})
    lines = dict(idle_settings(config, objective_of(config)))
    assert f" has no effect: it acts with {condition.words(here.replace('NAME', 'hard'))}" in lines[place]
    assert lines[place].startswith(f"{place} ")
    config = config_with({**settled(condition, here, True), path: value})
    assert place not in dict(idle_settings(config, objective_of(config)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.path": "rows.jsonl"}, "data.path rows.jsonl has no effect: it acts with data.kind jsonl or"),
        ({"learner.optimizer.momentum": 0.9}, "it acts with learner.optimizer.kind muon (learner.optimizer.kind is"),
        ({"weights.dense_every": 3}, "acts with weights.delta true (weights.delta is false)"),
        ({"rollout.express": 1}, "rollout.express 1 has no effect: it acts with rollout.replicas other than 1"),
        ({"objective.horizon": 64}, "it acts with objective.aggregation fixed_length (objective.aggregation is"),
        ({"learner.reference.offload": True}, "acts with learner.reference.source set"),
        ({"objective.recipe": "vespo", "objective.proximal": "recompute"}, "it changes nothing in the loss"),
        ({"objective.recipe": "dppo", "objective.proximal": "recompute"}, "it changes nothing in the loss"),
        ({"objective.recipe": "dro", "objective.proximal": "recompute"}, "it changes nothing in the loss"),
        ({"objective.recipe": "rloo", "objective.clip_high": 0.3}, "objective.clip_high 0.3 has no effect"),
        ({"objective.kl_kind": "k1"}, "acts with objective.kl_beta other than 0.0"),
        ({"learner.lora.alpha": 8.0}, "learner.lora.alpha 8.0 has no effect: it acts with learner.lora.rank set"),
        ({"reward.workers": 4}, "reward.workers 4 has no effect"),
    ],
)  # fmt: skip
def test_what_people_have_set_in_vain_is_warned_of(changes: Assignments, says: str, usable: Any) -> None:
    _, warned = build(usable(**changes))
    assert [line for line in warned if says in line], warned
    with pytest.raises(ConfigError, match=r"has no effect|changes nothing"):
        build(usable(**changes, **{"run.strict": True}))


def test_a_recipe_that_is_made_for_one_size_of_group_is_refused_with_another(usable: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"two_grpo is for groups of 2, but batch\.group_size is 8; set it to 2"
    ):
        build(usable(**{"objective.recipe": "two_grpo"}))
    assert build(usable(**{"objective.recipe": "two_grpo", "batch.group_size": 2}))[1] == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("sampling.top_p", "would bias every ratio; remove it"),
        ("sampling.top_k", "would bias every ratio; remove it"),
        ("sampling.min_p", "would bias every ratio; remove it"),
        ("sampling.repetition_penalty", "would bias every ratio; remove it"),
        ("objective.temperature", "the learner's logprobs are at sampling.temperature"),
    ],
)
def test_a_setting_with_one_legal_value_is_none_and_its_name_says_why(path: str, why: str, usable: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build(usable(**{path: 1.0}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: no setting; ")
    assert why in problem


def test_advantages_that_nobody_gives_are_no_choice(usable: Any) -> None:
    with pytest.raises(ConfigError, match=r"objective\.advantage: should be .*\(got 'given'\)"):
        build(usable(**{"objective.advantage": "given"}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_brings_is_not_held_against_anybody(recipe: str, usable: Any) -> None:
    """Also where it was recorded: then every setting is written out."""
    needs = {"dr_grpo": {"horizon": 64}, "gdpo": {}, "centred": {}}.get(recipe, {})
    config = Config.model_validate(usable(objective={"recipe": recipe, **needs}))
    assert list(idle_settings(config, objective_of(config))) == []
    again = Config.model_validate(resolved(config))
    assert list(idle_settings(again, objective_of(again))) == []


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (when("a.b", True), "a.b true"),
        (unless("b", None) & when("a.c", "x", "y"), "here.b set and a.c x or y"),
        ((when("b", 1) | unless("c", 2)) & unlike("d", "x", "y"), "(here.b 1, or here.c other than 2) and here.d y"),
    ],
)  # fmt: skip
def test_a_condition_says_itself_in_words(condition: Condition, words: str) -> None:
    assert condition.words("here") == words


def test_what_is_turned_off_needs_nothing_to_act_on() -> None:
    """Else proximal none would be told to set the clip to null, and then that null has no effect."""
    tree = {"objective": {"correction": "tis", "proximal": "none", "clip_low": None, "clip_high": None}}
    rewards = {"functions": [{"use": "last_number"}]}
    assert build({"data": {"kind": "arithmetic"}, "reward": rewards, **tree})[1] == []
