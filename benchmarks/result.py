"""How every benchmark ends: which of its aims are missed, and its figures as one line of JSON."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


def missed(figures: Mapping[str, Any], aims: Mapping[str, str]) -> dict[str, str]:
    """What of the aims does not hold, by the figure's name; a figure that was not measured is not compared.

    Args:
        figures: Numbers by name; None where one was not measured.
        aims: By the name of a figure a comparison with a number, such as ">= 2".
    """
    found = {}
    for name, aim in aims.items():
        comparison, bound = aim.split()
        figure = figures.get(name)
        if figure is not None and not _HOLDS[comparison](figure, float(bound)):
            found[name] = f"{figure:g}, aim {aim}"
    return found


def unmeasured(figures: Mapping[str, Any], aims: Mapping[str, str]) -> dict[str, str]:
    """The aims of figures that were not measured, by the figure's name: they are neither met nor missed."""
    return {name: aim for name, aim in aims.items() if figures.get(name) is None}


def tell(benchmark: str, figures: Mapping[str, Any], aims: Mapping[str, str], **more: Any) -> None:
    """Print the aims that are missed or open for a person, and last of all the line for a program."""
    lacking, unknown = missed(figures, aims), unmeasured(figures, aims)
    for name, why in lacking.items():
        print(f"aim missed: {name}: {why}")
    for name, aim in unknown.items():
        print(f"aim open: {name}: not measured, aim {aim}")
    if aims and not lacking and not unknown:
        print("all aims met")
    print(json.dumps({"benchmark": benchmark, **more, "figures": figures, "aims": aims}), flush=True)
