"""User functions: found by path, recognised by their signature, called in their form.

Two forms are known. The batch form `f(prompts, completions, **columns) -> list[float | None]` is TRL's; it gets
only the columns that its signature names, or all of them with `**kwargs`. The one-sample form is
`f(completion, task) -> float | dict[str, float] | None`. Either may be `async`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards.base import FORM_MARK, READS_MARK, Form, ScorerFault, Task, place_of

Reward = Callable[..., Any]

_FORMS = (
    "write it as `f(prompts, completions, **columns) -> list[float | None]` or as"
    " `f(completion, task) -> float | dict[str, float] | None`, or mark it with `batch_reward` or"
    " `sample_reward`"
)


def load_function(path: str, what: str = "scorer") -> Reward:
    """Import the function that `package.module:function` or `file.py:function` names.

    Raises:
        UserError: No such file, module or function, or the import fails; the message holds the cause.
    """
    where, _, name = path.rpartition(":")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except MemoryError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{place_of(error)}"
        mend = "raise memory_mb" if "failed to map segment" in cause else ""
        raise UserError(f"{what} {path!r}: importing {where!r} failed: {cause}", mend) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise UserError(f"{what} {path!r}: {where!r} has no function {name!r}", f"it has {there or 'none'}")
    found: Reward = function
    return found


def recognise_form(function: Reward) -> Form:
    """The form of a function, by its mark or by the names of its parameters.

    Raises:
        UserError: It has neither form; the message names both.
    """
    mark: Form | None = getattr(function, FORM_MARK, None)
    if mark is not None:
        return mark
    names = _parameters(function)
    if "completions" in names:
        return "batch"
    if "completion" in names:
        return "sample"
    label = getattr(function, "__name__", repr(function))
    given = ", ".join(names) or "nothing"
    raise UserError(f"reward function {label!r} takes ({given}), which is neither of the two forms", _FORMS)


def is_async(function: Reward) -> bool:
    """Whether calling it gives an awaitable."""
    plain = inspect.unwrap(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def check_options(function: Reward, options: Mapping[str, Any]) -> None:
    """Refuse options that the function has no parameter for.

    Raises:
        UserError: Naming the first such option.
    """
    names = _parameters(function)
    for option in options:
        if option not in names and not _takes_all(function):
            raise UserError(
                f"options: the reward function has no parameter {option!r}", f"it takes {', '.join(names)}"
            )


def needed_columns(function: Reward, form: Form) -> list[str]:
    """Columns that a row must have: those that the signature requires, and those declared with `reads`."""
    given = ("prompts", "completions") if form == "batch" else ("completion", "task")
    by_name = [name for name in _required(function) if name not in given]
    declared = getattr(getattr(function, "func", function), READS_MARK, ())
    return list(dict.fromkeys([*by_name, *declared]))


def batch_arguments(
    function: Reward, prompt: str, completions: Sequence[str], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the batch form: every column as a list of one entry per completion.

    Raises:
        ScorerFault: The signature requires a column that the row hasn't got.
    """
    count = len(completions)
    offered = {name: [value] * count for name, value in columns.items()}
    offered |= {"prompts": [prompt] * count, "completions": list(completions)}
    return _accepted(function, offered)


def sample_arguments(function: Reward, completion: str, task: Task) -> dict[str, Any]:
    """Arguments of the one-sample form; a column that the signature names comes by its name.

    Raises:
        ScorerFault: The signature requires a column that the row hasn't got.
    """
    named = _parameters(function)
    columns = {name: value for name, value in task.columns.items() if name in named}
    return _accepted(function, columns | {"completion": completion, "task": task})


def _accepted(function: Reward, offered: Mapping[str, Any]) -> dict[str, Any]:
    bound = getattr(function, "keywords", {})  # an option of the config comes before a column of its name
    offered = {name: value for name, value in offered.items() if name not in bound}
    missing = [name for name in _required(function) if name not in offered]
    if missing:
        raise ScorerFault(
            f"the function asks for {missing[0]!r}, but there is only {', '.join(sorted(offered))}"
        )
    if _takes_all(function):
        return dict(offered)
    named = _parameters(function)
    return {name: value for name, value in offered.items() if name in named}


def _required(function: Reward) -> list[str]:
    """Parameters that must be given."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _parameters(function: Reward) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _takes_all(function: Reward) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    name = f"_slipstream_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look their module up by name; a file's neighbours are importable as in a script.
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module
