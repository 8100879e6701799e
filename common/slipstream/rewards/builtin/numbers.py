"""Numbers as people write them, read exactly: thousands, percent, fractions, mixed, scientific, LaTeX.

Every value is a `Fraction`. Two numbers are the same when their values are equal; where at least one is
written with a decimal point or an exponent and not both are integers, a relative difference of 1e-6 is allowed.
So 3.00 is 3 and 0.3333333 is 1/3, but 0.333 isn't, nor is 10000001 the number 10000000.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from fractions import Fraction

from slipstream.rewards.builtin.characters import asciify
from slipstream.rewards.builtin.wrappers import bare, bare_number

RELATIVE = Fraction(1, 10**6)
# Longer texts and larger exponents are no answer to a sum, and would cost time to work out.
_MAX_CHARS = 2000
_MAX_EXPONENT = 2000

_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SPACED = r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?"
_TIMES = r"\s*(?:\\times|\\cdot|\*|x)\s*"
_TEN = r"10\s?(?:\^|\*\*)\s?(?:\{\s?(?P<tens>[+-]?\s?[0-9]+)\s?\}|(?P<bare>[+-]?[0-9]+))"
_FRAC = (
    r"\\[dt]?frac\s?(?:\{\s?(?P<fa>[+-]?\s?[0-9.]+)\s?\}\s?\{\s?(?P<fb>[0-9.]+)\s?\}"
    r"|(?P<ha>[0-9])\s?(?P<hb>[0-9]))"
)
_SLASH = rf"(?P<sa>{_PLAIN})\s?/\s?(?P<sb>{_PLAIN})"

_DECIMAL = re.compile(rf"(?P<m>{_PLAIN}|{_SPACED})(?:[eE](?P<e>[+-]?[0-9]+))?")
_POWER = re.compile(rf"(?:(?P<m>{_PLAIN}){_TIMES})?{_TEN}")
_FRACTION = re.compile(rf"{_FRAC}|{_SLASH}")
_MIXED = re.compile(rf"(?P<whole>[0-9]+)(?:\s?(?={chr(92) * 2})|\s)(?:{_FRAC}|{_SLASH})")
_PERCENT = re.compile(r"\s?(?:\\?%|\\text\{\s?(?:%|\\%|per ?cent)\s?\}|per ?cent)$", re.IGNORECASE)
_UNIT = re.compile(r"\s?(?:\\(?:text|mathrm|mbox)\{[^{}]*\}|\^\s?\{?\s?\\circ\s?\}?|\\degree|°)$")
_SCIENTIFIC = re.compile(rf"[+-]?\s?{_PLAIN}[eE][+-]?[0-9]+")

_LOOSE_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_LOOSE_PERCENT = r"(?:\s?(?:\\?%|per ?cent\b))?"
_LOOSE_FRAC = r"\\[dt]?frac\s?(?:\{[^{}]{1,80}\}\s?\{[^{}]{1,80}\}|[0-9]{2})"
_LOOSE_TEN = (
    r"(?:[eE][+-]?[0-9]+(?![0-9A-Za-z])"
    r"|\s?(?:\\times|\\cdot|\*)\s?10\s?(?:\^|\*\*)\s?(?:\{[^{}]{1,20}\}|-?[0-9]+))"
)
_LOOSE = re.compile(
    rf"(?P<sign>[+-]\s?)?(?:\\?\$)?(?P<body>"
    rf"(?:[0-9]+\s?)?{_LOOSE_FRAC}|[0-9]+ [0-9]+/[0-9]+"
    rf"|{_LOOSE_NUMBER}(?:\s?/\s?{_LOOSE_NUMBER}|{_LOOSE_TEN})?)"
    rf"(?P<percent>{_LOOSE_PERCENT})",
    re.IGNORECASE,
)
_LOOSE_PLAIN = re.compile(
    rf"(?P<sign>[+-]\s?)?(?:\\?\$)?(?P<body>{_LOOSE_NUMBER})(?P<percent>{_LOOSE_PERCENT})"
)
_GOES_ON = re.compile(
    r"[.,:]?[0-9]|[A-Za-z_]+[0-9]|\s?[+^]\s?[A-Za-z]|\*[A-Za-z]"
    r"|\s?(?:[-+*/^x]|\\times|\\cdot|\\div)\s?[-+(]?\s?(?:[0-9(]|\\[dt]?frac|\\sqrt)"
)


@dataclasses.dataclass(frozen=True)
class Number:
    """An exact number and how it was written."""

    value: Fraction
    decimal: bool = False
    percent: bool = False

    @property
    def face(self) -> Fraction:
        """The number as written, before its percent sign."""
        return self.value * 100 if self.percent else self.value


def parse_number(text: str) -> Number | None:
    """The number that the *whole* text is, or None; never raises."""
    text = tidy(text)
    if not text or len(text) > _MAX_CHARS:
        return None
    number = _parse(text) or _parse(_UNIT.sub("", text).strip())
    if number is None and (inner := bare_number(text)) != text:
        inner = tidy(inner)
        number = _parse(inner) or _parse(_UNIT.sub("", inner).strip())
    return number


def parse_values(text: str) -> tuple[Number, ...] | None:
    """The numbers of a tuple such as `(0, 1)` or `0,1`; a single number is a tuple of one. None otherwise."""
    number = parse_number(text)
    if number is not None:
        return (number,)
    text = bare(tidy(text))
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    parts = [parse_number(part) for part in inner.split(",")[:1000]]
    numbers = tuple(part for part in parts if part is not None)
    return numbers if len(numbers) == len(parts) > 1 else None


def find_numbers(text: str, plain: bool = False) -> Iterator[str]:
    """Numbers inside running text, in order, each readable by `parse_number`.

    A comma counts only between digits. A minus is a sign unless an operand stands before it: `5-3` holds 5
    and 3, `= -3` holds -3. With `plain` no fractions and no exponents are read: `1/2` holds 1 and 2.
    """
    text = asciify(text)
    for found in (_LOOSE_PLAIN if plain else _LOOSE).finditer(text):
        negative = (found["sign"] or "").startswith("-") and not _operand_before(text, found.start())
        yield ("-" if negative else "") + found["body"] + (found["percent"] or "")


def leading_number(text: str) -> str | None:
    """The number that a text begins with, or None where what follows makes it a part of something else.

    `42 apples`, `42km` and `42.` begin with 42; `12x34`, `12 * 34`, `12:30` and `1.2.3` with no number.
    """
    text = asciify(text).strip()
    found = _LOOSE.match(text)
    if found is None or _GOES_ON.match(text, found.end()):
        return None
    return ("-" if (found["sign"] or "").startswith("-") else "") + found["body"] + (found["percent"] or "")


def same(gold: Number, other: Number, lenient_percent: bool = False) -> bool:
    """Whether two numbers are the same; `lenient_percent` also takes a bare 28 for 28 % and the reverse."""
    if _near(gold.value, other.value, gold.decimal or other.decimal):
        return True
    if not lenient_percent or gold.percent == other.percent:
        return False
    return _near(gold.face, other.face, gold.decimal or other.decimal)


def looks_scientific(text: str) -> bool:
    """Whether the text is written like `1e-3`, whatever the size of its exponent."""
    return bool(_SCIENTIFIC.fullmatch(tidy(text)))


def tidy(text: str) -> str:
    """Text without what only typesets it: math delimiters, thin spaces, `{,}`, sizes, a closing full stop."""
    text = asciify(text).replace("{,}", ",").replace(r"\!", "").replace(r"\left", "").replace(r"\right", "")
    text = re.sub(r"\\[,;: ]|~|\\(?:thin|med|thick)space(?![A-Za-z])|\s", " ", text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = " ".join(text.split())
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$") and not text.endswith(r"\$"):
        text = text.strip("$").strip()
    return text.removesuffix(".").strip()


def _parse(text: str) -> Number | None:
    body = _PERCENT.sub("", text)
    percent = body != text
    sign, body = _take_sign(body)
    body = re.sub(r"^\\?\$\s?", "", body)
    for read in (_read_decimal, _read_power, _read_fraction, _read_mixed):
        value = read(body)
        if value is not None:
            value = sign * value / (100 if percent else 1)
            return Number(
                value, decimal="." in body or read is _read_power or "e" in body.lower(), percent=percent
            )
    return None


def _take_sign(body: str) -> tuple[int, str]:
    """Sign and rest; the sign may stand before or after a currency sign, not twice."""
    body = body.strip()
    if body[:1] in ("+", "-"):
        return (-1 if body[0] == "-" else 1), body[1:].strip()
    after_currency = re.match(r"\\?\$\s?([+-])\s?(?=[0-9.])", body)
    if after_currency:
        return (-1 if after_currency[1] == "-" else 1), body[after_currency.end() :]
    return 1, body


def _read_decimal(body: str) -> Fraction | None:
    found = _DECIMAL.fullmatch(body)
    return _scaled(found["m"], found["e"]) if found else None


def _read_power(body: str) -> Fraction | None:
    found = _POWER.fullmatch(body)
    return _scaled(found["m"] or "1", (found["tens"] or found["bare"]).replace(" ", "")) if found else None


def _read_fraction(body: str) -> Fraction | None:
    found = _FRACTION.fullmatch(body)
    return _ratio(found) if found else None


def _read_mixed(body: str) -> Fraction | None:
    found = _MIXED.fullmatch(body)
    part = _ratio(found) if found else None
    if found is None or part is None or not 0 <= part < 1:
        return None
    return int(found["whole"]) + part


def _ratio(found: re.Match[str]) -> Fraction | None:
    top, bottom = next(
        (found[a], found[b]) for a, b in (("fa", "fb"), ("ha", "hb"), ("sa", "sb")) if found[a] is not None
    )
    numerator, denominator = _scaled(top.replace(" ", ""), None), _scaled(bottom, None)
    return numerator / denominator if numerator is not None and denominator else None


def _scaled(digits: str, exponent: str | None) -> Fraction | None:
    """`digits` (with separators) times ten to the `exponent`, or None where that is too large or no number."""
    if exponent is not None and (len(exponent) > 8 or abs(int(exponent)) > _MAX_EXPONENT):
        return None
    try:
        value = Fraction(digits.replace(",", "").replace(" ", "").removesuffix("."))
    except ValueError:
        return None
    return value * Fraction(10) ** int(exponent or 0)


def _near(one: Fraction, two: Fraction, inexact: bool) -> bool:
    if one == two or not inexact or (one.denominator == 1 and two.denominator == 1):
        return one == two
    return abs(one - two) <= RELATIVE * max(abs(one), abs(two))


def _operand_before(text: str, end: int) -> bool:
    """Whether what stands before a minus at `end` makes it a difference or a hyphen, not a sign."""
    before = text[max(0, end - 40) : end]
    if re.search(r"[0-9A-Za-z)\]}%.]$", before):
        return True
    return bool(re.search(r"(?:[0-9)\]}%]|(?<![A-Za-z0-9])[A-Za-z])\s+$", before))
