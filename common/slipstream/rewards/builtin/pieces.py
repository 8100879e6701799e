"""Tests as pieces of code that a program's process runs one after another, each with what it counts."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from slipstream.rewards.builtin.cases import Calls, Cases, Code, Doctest, Pairs, is_check

# Runs the program on a standard input, and keeps what it prints; ending by exit() is an end like any other.
_FED = """
import io as _io, sys as _sys
def _fed(code, data):
    stdin, stdout = _sys.stdin, _sys.stdout
    _sys.stdin = _io.TextIOWrapper(_io.BytesIO(data.encode()))
    _sys.stdout = printed = _io.TextIOWrapper(_io.BytesIO(), write_through=True)
    try:
        exec(compile(code, "<completion>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        _sys.stdin, _sys.stdout = stdin, stdout
    return printed.buffer.getvalue().decode(errors="replace")
"""
_SAME_TEXT = """
def _same_text(got, wanted):
    if [line.rstrip() for line in got.rstrip().splitlines()] == [l.rstrip() for l in wanted.rstrip().splitlines()]:
        return True
    got, wanted = got.split(), wanted.split()
    return len(got) == len(wanted) and all(map(_same_word, got, wanted))
def _same_word(got, wanted):
    if got == wanted:
        return True
    try:
        near = abs(float(got) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
        return near and ("." in wanted or "e" in wanted)
    except ValueError:
        return False
"""
_SAME_VALUE = """
def _same_value(got, wanted):
    got = _plain(got)
    return got == wanted or [got] == wanted
def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
"""
_CALLED = """
for _name in {names}:
    _test = globals().get(_name)
    if isinstance(_test, type) and any(base.__name__ == "TestCase" for base in _test.__mro__):
        import unittest as _unittest
        _result = _unittest.TestResult()
        _unittest.defaultTestLoader.loadTestsFromTestCase(_test).run(_result)
        _ran[0] += _result.testsRun
        if not _result.wasSuccessful():
            raise AssertionError((_result.failures + _result.errors)[0][1].strip().splitlines()[-1])
    elif isinstance(_test, type) and _name.startswith("Test"):
        for _method in dir(_test):
            if _method.startswith("test"):
                getattr(_test(), _method)()
    elif callable(_test) and _name == "check":
        check(*([{entry}] if _test.__code__.co_argcount else []))
    elif callable(_test) and _name.startswith("test_"):
        _test()
if not _ran[0]:
    raise RuntimeError("no check ran")
"""


@dataclasses.dataclass(frozen=True)
class TestPiece:
    """Code to run; `name` is how it is called in messages and by the runner, and `counts` whether it is a test."""

    name: str
    code: str
    counts: bool = False


def pieces_of(cases: Cases, completion: str, entry: str, partial: bool) -> Iterator[TestPiece]:
    """The completion and its tests, in order.

    Args:
        cases: What the row holds.
        completion: The code of the completion.
        entry: Name of the function that `check` is called with; empty takes the last that the completion defines.
        partial: Give each assert a piece of its own.
    """
    if isinstance(cases, Pairs):
        yield TestPiece("tests set-up", _FED + _SAME_TEXT)
        for data, wanted in cases.pairs:
            yield TestPiece("completion", f"_got = _fed({completion!r}, {data!r})")
            message = f"printed other than {wanted[:60]!r}"
            yield TestPiece("tests", f"assert _same_text(_got, {wanted!r}), {message!r}", counts=True)
        return
    yield TestPiece("completion", completion)
    if isinstance(cases, Calls):
        name = cases.function
        yield TestPiece("tests set-up", _SAME_VALUE)
        for arguments, wanted in cases.calls:
            found = f"getattr(Solution(), {name!r}) if 'Solution' in globals() else {name}"
            yield TestPiece("call", f"_got = ({found})(*{list(arguments)!r})")
            told = f"assert _same_value(_got, {wanted!r}), 'returned %.60r' % (_got,)"
            yield TestPiece("tests", told, counts=True)
    elif isinstance(cases, Doctest):
        yield TestPiece("tests", _doctest(cases.text), counts=True)
    else:
        yield from _code(cases, entry or last_function(completion), partial)


def last_function(code: str) -> str:
    """Name of the last function that a program defines at its top; "None" where there is none."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError):
        return "None"
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return names[-1] if names else "None"


def _code(cases: Code, entry: str, partial: bool) -> Iterator[TestPiece]:
    yield TestPiece("tests set-up", "_ran = [0]")
    for text in cases.texts:
        tree = _Counted().visit(ast.parse(text))
        if not partial:
            yield TestPiece("tests", _written(tree.body), counts=True)
            continue
        for node in tree.body:
            asserts = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Assert)
            yield TestPiece("tests", _written([node]), counts=asserts)
    names = _tests_in(cases)
    called = _CALLED.replace("{names}", repr(names)).replace("{entry}", entry)
    yield TestPiece("tests", called, counts=bool(names))


def _written(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))


def _tests_in(cases: Code) -> list[str]:
    """Functions and classes that are tests, which only the call at the end runs."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tops = [node for text in cases.texts for node in ast.parse(text).body if isinstance(node, kinds)]
    cased = [node.name for node in tops if isinstance(node, ast.ClassDef) and "TestCase" in ast.dump(node)]
    named = [node.name for node in tops if node.name == "check" or node.name.lower().startswith("test")]
    return list(dict.fromkeys([*named, *cased]))


class _Counted(ast.NodeTransformer):
    """Counts each check when it runs: `if True: _ran[0] += 1; assert …`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self._counted(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._counted(node) if is_check(node.value) else node

    def visit_With(self, node: ast.With) -> ast.AST:
        expects = any(is_check(item.context_expr) for item in node.items)
        self.generic_visit(node)
        return self._counted(node) if expects else node

    def _counted(self, node: ast.stmt) -> ast.AST:
        count = ast.parse("_ran[0] += 1").body[0]
        return ast.If(ast.Constant(True), [count, node], [])


def _doctest(text: str) -> str:
    return f"""
import doctest as _doctest
_runner = _doctest.DocTestRunner(verbose=False)
_said = []
_test = _doctest.DocTestParser().get_doctest({text!r}, globals(), "tests", None, 0)
_runner.run(_test, out=_said.append, clear_globs=False)
assert not _runner.failures, "".join(_said)[:200]
"""
