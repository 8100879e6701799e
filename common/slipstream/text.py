"""Text that any encoder takes, and text that holds something."""

from __future__ import annotations

import json
from typing import Any

REPLACEMENT = "\ufffd"


def repair(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced, so that it can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def opened(value: Any) -> Any:
    """What a text holds if it is JSON of an object or a list; else the value itself."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value
