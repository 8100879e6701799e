"""Settings that somebody chose and that nothing reads under the rest of the config.

A setting counts as chosen when it differs from what it would be without a word: its default, or the recipe's value. A
config that a run recorded holds every setting, and says the same about itself as the one it was made of. What cannot
act is warned of, not refused, since people share a base config between setups; `run.strict` makes errors of warnings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from slipstream.algo.settings.recipes import resolve
from slipstream.algo.settings.spec import Objective
from slipstream.conditions import Condition, Look
from slipstream.config.base import Section
from slipstream.config.sections.objective_config import RecipeSection

_LONGEST, _MOST = 60, 3


def idle_settings(config: Section, objective: Objective) -> Iterator[tuple[str, str]]:
    """(path, line) of each chosen setting that cannot act; the line names its value and what would let it act.

    Args:
        config: The whole config.
        objective: What its objective comes to, the recipe's values included.
    """
    fields = dataclasses.asdict(objective)
    for path, section, name, field in _settings(config):
        condition = condition_of(field)
        value = getattr(section, name)
        if condition is None or value is None or not _chosen(section, name, field):
            continue  # null turns something off, which is in place also where it would not act
        here = path.rpartition(".")[0]
        look = lookup(config, here, fields)
        if not condition.holds(look):
            wanted = f"it acts with {condition.words(here)}{_now(condition, here, look)}"
            yield (
                path,
                f"{path} {_short(value)} has no effect: {wanted}",
            )


def condition_of(field: FieldInfo) -> Condition | None:
    """The choice under which a setting acts; None where it always does."""
    return next((each for each in field.metadata if isinstance(each, Condition)), None)


def lookup(config: Section, here: str, objective: Mapping[str, Any]) -> Look:
    """What gives a setting's value by its path, or by its name in the section at `here`; a missing one is None."""

    def look(name: str) -> Any:
        path = name if "." in name else f"{here}.{name}"
        section, _, key = path.partition(".")
        if section == "objective" and key in objective:
            return objective[key]
        return _value(config, path.split("."))

    return look


def _value(node: Any, path: list[str]) -> Any:
    for place, key in enumerate(path):
        if key == "*":
            return [_value(each, path[place + 1 :]) for each in node]
        if isinstance(node, list):
            node = node[int(key)]
        elif isinstance(node, dict):
            node = node.get(key)
        else:
            node = getattr(node, key, None)
    return node


def _settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Section, str, FieldInfo]]:
    """(path, section, name, field) of every plain setting of a config, those of entries included."""
    for name, field in type(section).model_fields.items():
        path, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, Section):
            yield from _settings(value, f"{path}.")
            continue
        yield path, section, name, field
        entries = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, entry in entries:
            if isinstance(entry, Section):
                yield from _settings(entry, f"{path}.{key}.")


def _chosen(section: Section, name: str, field: FieldInfo) -> bool:
    default = field.get_default(call_default_factory=True)
    if isinstance(section, RecipeSection):
        others = section.overrides()
        if name not in others:
            return False
        del others[name]
        default = getattr(resolve(section.recipe, others), name)
    return bool(getattr(section, name) != default)


def _now(condition: Condition, here: str, look: Look) -> str:
    """What the settings that would have to differ are now."""
    names = dict.fromkeys(atom.name for atom in condition.atoms() if not atom.holds(look))
    plain = [(name, look(name)) for name in names if not isinstance(look(name), dict | list)]
    full = [f"{name if '.' in name else f'{here}.{name}'} is {_short(value)}" for name, value in plain]
    return f" ({', '.join(full[:_MOST])})" if full else ""


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    text = value if isinstance(value, str) and value else text
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
