"""Text that any encoder takes."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


def repair(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced, so that it can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
