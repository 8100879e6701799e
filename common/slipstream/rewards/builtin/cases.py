"""Tests of a program in the shapes that data sets publish: asserts, functions and classes of tests, doctest, pairs of
input and output, calls with what they return. Read by their form, never by running them."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.rewards.base import ScorerFault

_INPUTS, _OUTPUTS = ("inputs", "input", "stdin"), ("outputs", "output", "stdout", "expected_output")
_WITHIN = ("tests", "test", "test_cases", "cases", "input_output", "assert_case", "test_list", "unit_tests")


@dataclasses.dataclass(frozen=True)
class Code:
    """Python that checks by itself: every text is run in turn, and what it defines as a test is called."""

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Doctest:
    """Lines of `>>>` with what they show."""

    text: str


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What a program reads, and what it has to print for it."""

    pairs: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Calls:
    """Arguments of a function by name, and what it has to return for them."""

    function: str
    calls: tuple[tuple[tuple[Any, ...], Any], ...]


Cases = Code | Doctest | Pairs | Calls


def read_cases(value: Any, column: str = "tests") -> Cases:
    """The tests that a column holds.

    Raises:
        ScorerFault: None that can be read, or none that checks anything; says what is there.
    """
    if isinstance(value, str):
        held = _held(value)
        return _of_text(value, column) if held is None else read_cases(held, column)
    if isinstance(value, Mapping):
        return _of_mapping(value, column)
    if isinstance(value, list | tuple) and value:
        return _of_list(value, column)
    raise ScorerFault(f"column {column!r} holds no test ({value!r:.60})")


def _held(text: str) -> Any:
    """The list, object or text that a text writes down, as JSON or as Python does; None for any other text."""
    stripped = text.strip()
    if stripped[:1] not in ("[", "{", '"', "("):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(stripped)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list | tuple | dict | str) else None
    return None


def _of_text(text: str, column: str) -> Cases:
    if _is_doctest(text):
        return Doctest(text)
    count_checks([text], column)
    return Code((text,))


def _is_doctest(text: str) -> bool:
    try:
        return any(example.want for example in doctest.DocTestParser().get_examples(text))
    except ValueError:
        return False


def _of_mapping(value: Mapping[str, Any], column: str) -> Cases:
    inputs, outputs = _first(value, _INPUTS), _first(value, _OUTPUTS)
    if inputs is not None and outputs is not None:
        single = not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple)
        given = ([inputs], [outputs]) if single else (list(inputs), list(outputs))
        return _paired(*given, str(value.get("fn_name") or ""), column)
    inner = _first(value, _WITHIN)
    if inner is None:
        keys = ", ".join(map(str, value)) or "nothing"
        raise ScorerFault(f"column {column!r} holds {keys}: no tests that can be read")
    return read_cases(inner, column)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _paired(inputs: list[Any], outputs: list[Any], function: str, column: str) -> Cases:
    if len(inputs) != len(outputs) or not inputs:
        raise ScorerFault(f"column {column!r} holds {len(inputs)} inputs and {len(outputs)} outputs")
    if function:
        return Calls(
            function,
            tuple((_arguments(each), _value(out)) for each, out in zip(inputs, outputs, strict=True)),
        )
    return Pairs(tuple((_lines(each), _lines(out)) for each, out in zip(inputs, outputs, strict=True)))


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    """A list holds the arguments, a text one on each line as JSON."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return tuple(_value(line) for line in value.splitlines()) if isinstance(value, str) else (value,)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _of_list(values: Sequence[Any], column: str) -> Cases:
    if all(isinstance(each, Mapping) for each in values):
        return _of_mappings(values, column)
    texts = list(_flat(values))
    if not all(isinstance(each, str) for each in texts):
        raise ScorerFault(
            f"column {column!r} holds a list of {type(texts[0]).__name__}: no tests that can be read"
        )
    if all(_is_pair(each) for each in values) and not _checks_of(texts[0]):
        return Pairs(tuple((first, second) for first, second in values))
    count_checks(texts, column)
    return Code(tuple(texts))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _of_mappings(values: Sequence[Mapping[str, Any]], column: str) -> Cases:
    """As LiveCodeBench has them: one object for each case."""
    inputs, outputs = [_first(v, _INPUTS) for v in values], [_first(v, _OUTPUTS) for v in values]
    if None not in inputs and None not in outputs:
        names = {str(v.get("fn_name") or v.get("func_name") or "") for v in values}
        if any(v.get("testtype") == "functional" for v in values) and names == {""}:
            raise ScorerFault(f"column {column!r} holds functional cases and no fn_name")
        return _paired(inputs, outputs, names.pop() if len(names) == 1 else "", column)
    inner = [_first(v, _WITHIN) for v in values]
    if None in inner:
        keys = ", ".join(map(str, values[0])) or "nothing"
        raise ScorerFault(f"column {column!r} holds objects of {keys}: no tests that can be read")
    return read_cases(inner, column)


def _flat(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def count_checks(texts: Sequence[str], column: str) -> int:
    """How many checks texts of Python make.

    Raises:
        ScorerFault: None at all, or one of them is no Python.
    """
    found = 0
    for text in texts:
        checks = _checks_of(text)
        if checks is None:
            raise ScorerFault(f"column {column!r} holds tests that are no Python: {text.strip()[:60]!r}")
        found += checks
    if not found:
        raise ScorerFault(
            f"column {column!r} holds no check ({texts[0].strip()[:60]!r}): neither an assert nor a function "
            "called check or test_…"
        )
    return found


def _checks_of(text: str) -> int | None:
    """Checks in a text of Python; None where it is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return sum(map(is_check, ast.walk(tree)))


def is_check(node: ast.AST) -> bool:
    """An assert, or a call of something that asserts or expects an error."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.lower().startswith("assert") or name == "raises"
