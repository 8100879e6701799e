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
    """What of the aims does not hold, by the figure's name; a figure that was not measured misses its aim.

    Args:
        figures: Numbers by name.
        aims: By the name of a figure a comparison with a number, such as ">= 2".
    """
    found = {}
    for name, aim in aims.items():
        comparison, bound = aim.split()
        if name not in figures:
            found[name] = f"not measured, aim {aim}"
        elif not _HOLDS[comparison](figures[name], float(bound)):
            found[name] = f"{figures[name]:g}, aim {aim}"
    return found


def tell(benchmark: str, figures: Mapping[str, Any], aims: Mapping[str, str], **more: Any) -> None:
    """Print the missed aims for a person, and last of all the line for a program."""
    lacking = missed(figures, aims)
    for name, why in lacking.items():
        print(f"aim missed: {name}: {why}")
    if aims and not lacking:
        print("all aims met")
    print(json.dumps({"benchmark": benchmark, **more, "figures": figures, "aims": aims}), flush=True)
