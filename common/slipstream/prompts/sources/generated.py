"""Built-in tasks without a file or a dependency: every row is computed from its index.

Questions are distinct: the index goes through a seeded permutation of the whole space of questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.order import Permutation

# Beyond this many distinct questions a set must say how many of them it wants.
_ALL_LIMIT = 100_000


class _Generated:
    """Shared by the generators: size, seeded order and the check of the number of rows asked for."""

    def __init__(self, kind: str, space: int, limit: int | None, seed: int) -> None:
        if limit is None and space > _ALL_LIMIT:
            raise UserError(f"data.limit: {kind} has {space} questions", "set limit to how many you want")
        self._size = space if limit is None else limit
        if self._size > space:
            raise UserError(
                f"data.limit: {limit} rows asked of {kind}, which has {space} distinct questions",
                f"set limit to at most {space}",
            )
        self._order = Permutation(space, f"{kind}/{seed}")

    def __len__(self) -> int:
        return self._size

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        return f"row {index}"


class Arithmetic(_Generated):
    """Sums such as `6 + 5 =`, in the form of reasoning-gym's chain_sum; `*` binds before `+` and `-`.

    Options: `terms` (2), `digits` of each number (1; then 0 counts too), `ops` (a string out of `+-*`).
    """

    def __init__(self, options: Mapping[str, Any], limit: int | None, seed: int) -> None:
        refuse_unknown("arithmetic", options, ("terms", "digits", "ops"))
        self._terms = positive("terms", options.get("terms", 2))
        digits = positive("digits", options.get("digits", 1))
        self._ops = str(options.get("ops", "+-"))
        if not self._ops or set(self._ops) - set("+-*") or len(set(self._ops)) < len(self._ops):
            raise UserError(f"data.options.ops: {self._ops!r}", "use each of + - * at most once, such as '+-'")
        self._low = 0 if digits == 1 else 10 ** (digits - 1)
        self._span = 10**digits - self._low
        space = len(self._ops) ** (self._terms - 1) * self._span**self._terms
        super().__init__("arithmetic", space, limit, seed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        code = self._order[index]
        numbers, ops = [], []
        for _ in range(self._terms):
            code, digit = divmod(code, self._span)
            numbers.append(self._low + digit)
        for _ in range(self._terms - 1):
            code, op = divmod(code, len(self._ops))
            ops.append(self._ops[op])
        words = [str(numbers[0])] + [f"{op} {n}" for op, n in zip(ops, numbers[1:], strict=True)]
        return {"prompt": f"{' '.join(words)} =", "answer": str(_evaluate(numbers, ops))}


class SortDigits(_Generated):
    """Digits to be sorted: prompt `314159>`, answer `113459$`.

    Options: `digits` (6), `mark` after the question (`>`), `stop` after the answer (`$`).
    """

    def __init__(self, options: Mapping[str, Any], limit: int | None, seed: int) -> None:
        refuse_unknown("sort_digits", options, ("digits", "mark", "stop"))
        self._digits = positive("digits", options.get("digits", 6))
        self._mark = str(options.get("mark", ">"))
        self._stop = str(options.get("stop", "$"))
        super().__init__("sort_digits", 10**self._digits, limit, seed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        digits = f"{self._order[index]:0{self._digits}d}"
        return {"prompt": digits + self._mark, "answer": "".join(sorted(digits)) + self._stop}


def _evaluate(numbers: Sequence[int], ops: Sequence[str]) -> int:
    """Value of the chain: products first, then sums from left to right."""
    total, product = 0, numbers[0]
    for op, number in zip(ops, numbers[1:], strict=True):
        if op == "*":
            product *= number
        else:
            total, product = total + product, number if op == "+" else -number
    return total + product


def positive(name: str, value: Any) -> int:
    """The option as an integer of at least 1.

    Raises:
        UserError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"data.options.{name}: {value!r}", "give a whole number of at least 1")
    return value


def refuse_unknown(kind: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that this source does not have.

    Raises:
        UserError: Naming the first unknown option.
    """
    for name in options:
        if name not in known:
            have = ", ".join(known)
            raise UserError(f"data.options.{name}: {kind} has no such option", f"it has {have}")
