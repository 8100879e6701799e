"""The base of every config section: strict, frozen, and every field described."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the config. Unknown keys are refused and types are not converted ("1e-6" is no number)."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """A field with its one-line description; the unit stands in the description."""
    return Field(default, description=description, validate_default=True, **bounds)


def sub(section: type[Section], description: str) -> Any:
    """A nested section that takes its defaults when it is absent."""
    return Field(default_factory=section, description=description)
