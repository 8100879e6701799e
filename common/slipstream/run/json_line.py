"""A record as one line of JSON, whatever its numbers are: what is not finite has no JSON and becomes null."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("slipstream.records")
_told: set[tuple[str, str]] = set()


def json_line(record: dict[str, Any], where: str) -> str:
    """The record on one line, without its end.

    Numbers that are not finite are told of once for each name and place (`where`), since nothing reads on from them.
    """
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        for name in _nonfinite(record, ""):
            if (where, name) not in _told:
                _told.add((where, name))
                log.warning("%s in %s is not finite and is written as null", name, where)
        return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _nonfinite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _nonfinite(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _nonfinite(each, path)
