"""Characters that people and models write for ASCII ones: minus signs, fullwidth digits, thin spaces."""

from __future__ import annotations

import re
import unicodedata

_SINGLE = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **dict.fromkeys("∕⁄／", "/"),
        "＋": "+",
        "．": ".",
        "，": ",",
        "％": "%",
        "（": "(",
        "）": ")",
        "＝": "=",
        "＄": "$",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
    }
)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_LOWERED = str.maketrans(_RAISED, "0123456789+-")
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_DIGIT = re.compile(r"[^\x00-\x7f]")


def asciify(text: str) -> str:
    """Text with number-like characters in ASCII: `−５` is `-5`, `10⁻³` is `10^{-3}`, `1½` is `1 1/2`.

    Plain NFKC won't do: it turns `2³` into `23` and `1½` into `11/2`.
    """
    if text.isascii():
        return text
    text = _RAISED_RUN.sub(lambda run: "^{" + run[0].translate(_LOWERED) + "}", text)
    text = _VULGAR.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    return _DIGIT.sub(_ascii_digit, text.translate(_SINGLE))


def _ascii_digit(found: re.Match[str]) -> str:
    value = unicodedata.decimal(found[0], None)
    return found[0] if value is None else str(value)
