"""The base of every config section: strict, frozen, and every field described."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slipstream.conditions import Condition


class Section(BaseModel):
    """A part of the config. Unknown keys are refused and types are not converted ("1e-6" is no number)."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def setting(default: Any, description: str, *, acts: Condition | None = None, **bounds: Any) -> Any:
    """A field with its one-line description; the unit stands in the description.

    Args:
        default: Its value where none is given.
        description: What it is.
        acts: The choice under which it acts, if it does not always.
        bounds: Limits of its value, as pydantic names them.
    """
    field: Any = Field(default, description=description, validate_default=True, **bounds)
    if acts is not None:
        field.metadata.append(acts)
    return field


def sub(section: type[Section], description: str) -> Any:
    """A nested section that takes its defaults when it is absent."""
    return Field(default_factory=section, description=description)
