"""The objective's settings, made from the objective library's own fields so that there is one list of them.

A setting that is absent takes the recipe's value; one that is given, also as null, overrides it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, create_model

from slipstream.algo.settings.recipes import RECIPES
from slipstream.algo.settings.spec import Advantage, Objective, describe, hints
from slipstream.config.base import Section

# of the library's choices those that make advantages of rewards: a run's groups bring no others
_ESTIMATED = Literal[tuple(name for name in get_args(Advantage) if name != "given")]  # type: ignore[valid-type]


class RecipeSection(Section):
    """What is optimized: a named recipe, and any of its fields overridden."""

    recipe: str = Field("grpo", description="named recipe: " + ", ".join(sorted(RECIPES)))

    def overrides(self) -> dict[str, Any]:
        """The fields that the config sets itself."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - {"recipe"})}


def _fields() -> dict[str, Any]:
    described, kinds = describe(), hints() | {"advantage": _ESTIMATED}
    return {
        field.name: (kinds[field.name], Field(field.default, description=described[field.name]))
        for field in dataclasses.fields(Objective)
    }


if TYPE_CHECKING:
    ObjectiveSection = RecipeSection
else:
    ObjectiveSection = create_model(
        "ObjectiveSection", __base__=RecipeSection, __doc__=RecipeSection.__doc__, **_fields()
    )
