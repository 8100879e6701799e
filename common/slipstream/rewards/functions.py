"""User functions: found by path, recognised by their signature, called in their form.

Two forms are ours. The batch form `f(prompts, completions, **columns) -> list[float | None]` is TRL's; it gets
only the columns that its signature names, or all of them with `**kwargs`, and prompts and completions as messages
where the row's prompt is messages. The one-sample form is `f(completion, task) -> float | dict | None`, which gets
columns in the same way. Either may be `async`. Those of verl and OpenRLHF are made into these (`adapters`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards.adapters import HANDED, adapt, foreign_form
from slipstream.rewards.base import FORM_MARK, READS_MARK, Completions, Form, ScorerFault, Task, place_of

Reward = Callable[..., Any]

_FORMS = (
    "write it as `f(prompts, completions, **columns) -> list[float | None]` or as"
    " `f(completion, task) -> float | dict[str, float] | None`, or mark it with `batch_reward` or"
    " `sample_reward`; verl's `f(data_source, solution_str, ground_truth, extra_info)` and OpenRLHF's"
    " `f(queries, prompts, labels)` are known, too; where it makes a reward, name what it returns"
)
# What TRL hands to a batch function beside columns; here the run's step stands in for the trainer's.
EXTRAS = ("completion_ids", "trainer_state", "log_metric")
_GIVEN = {"batch": ("prompts", "completions", *EXTRAS), "sample": ("prompt", "completion", "task")}

# What imports say where the address space ends.
_OUT_OF_MEMORY = ("failed to map segment", "llocate memory", "SystemError: error return")


def load_function(path: str, what: str = "scorer") -> Reward:
    """Import the function that `package.module:function` or `file.py:function` names.

    Raises:
        UserError: No such file, module or function, or the import fails; the message holds the cause.
    """
    where, _, name = path.rpartition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: what it holds hides no library
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # a script without a guard may end itself
        cause = f"{type(error).__name__}: {error}{place_of(error)}"
        mend = _import_mend(cause)
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
    if (foreign := foreign_form(names)) is not None:
        return foreign
    label = getattr(function, "__name__", repr(function))
    given = ", ".join(names) or "nothing"
    raise UserError(f"reward function {label!r} takes ({given}), which is neither of the two forms", _FORMS)


def adapted(function: Reward) -> Reward:
    """A function of another project's form as one of ours, any other as it is."""
    plain = getattr(function, "func", function)
    if getattr(plain, FORM_MARK, None) is not None:
        return function
    return adapt(function, _parameters(plain), takes_all(plain))


def is_async(function: Reward) -> bool:
    """Whether calling it gives an awaitable."""
    plain = inspect.unwrap(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def check_options(function: Reward, options: Mapping[str, Any]) -> None:
    """Refuse options that the function has no parameter for, and those by the name of what it is handed.

    Raises:
        UserError: Naming the first such option.
    """
    names, form = _parameters(function), recognise_form(function)
    handed = (*_GIVEN[form], *(HANDED if foreign_form(names) is not None else ()))
    for option in options:
        if option in handed:
            raise UserError(f"options: {option!r} is what the reward function is handed", "take it out")
        if option not in names and not takes_all(function):
            raise UserError(
                f"options: the reward function has no parameter {option!r}", f"it takes {', '.join(names)}"
            )


def needed_columns(function: Reward, form: Form) -> list[str]:
    """Columns that a row must have: those that the signature requires, and those declared with `reads`."""
    by_name = [name for name in _required(function) if name not in _GIVEN[form]]
    declared = getattr(getattr(function, "func", function), READS_MARK, ())
    return list(dict.fromkeys([*by_name, *declared]))


def batch_arguments(
    function: Reward,
    prompt: str,
    completions: Sequence[str],
    columns: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
    how: Completions = "auto",
) -> dict[str, Any]:
    """Arguments of the batch form: every column as a list of one entry per completion.

    Args:
        function: The user's, with its options bound.
        prompt: The prompt's text.
        completions: The completions' texts.
        columns: The row's; `prompt` among them is the row's own, messages where it holds such.
        extras: By the names of `EXTRAS`.
        how: As texts or as messages; `auto` takes what the row's prompt is.

    Raises:
        ScorerFault: The signature requires a column that the row hasn't got.
    """
    count = len(completions)
    offered = {name: [value] * count for name, value in columns.items()}
    asked: Any = prompt
    answers: list[Any] = list(completions)
    if takes_messages(columns, how):
        asked = _messages_of(prompt, columns)
        answers = [[{"role": "assistant", "content": text}] for text in completions]
    offered |= {"prompts": [asked] * count, "completions": answers, **(extras or {})}
    return _accepted(function, offered)


def takes_messages(columns: Mapping[str, Any], how: Completions) -> bool:
    """Whether a batch function gets prompts and completions of this row as messages, as TRL has it."""
    return how == "messages" or (how == "auto" and isinstance(columns.get("prompt"), list))


def sample_arguments(
    function: Reward, completion: str, task: Task, how: Completions = "auto"
) -> dict[str, Any]:
    """Arguments of the one-sample form; a column that the signature names comes by its name, with `**kwargs` each.

    Prompt and completion are texts, unless messages are asked for.

    Raises:
        ScorerFault: The signature requires a column that the row hasn't got.
    """
    offered = {**task.columns, "prompt": task.prompt, "completion": completion, "task": task}
    if how == "messages":
        asked = _messages_of(task.prompt, task.columns)
        offered |= {"prompt": asked, "completion": [{"role": "assistant", "content": completion}]}
    return _accepted(function, offered)


def _messages_of(prompt: str, columns: Mapping[str, Any]) -> list[Any]:
    own = columns.get("prompt")
    return own if isinstance(own, list) else [{"role": "user", "content": prompt}]


def _accepted(function: Reward, offered: Mapping[str, Any]) -> dict[str, Any]:
    bound = getattr(function, "keywords", {})  # an option of the config comes before a column of its name
    offered = {name: value for name, value in offered.items() if name not in bound}
    missing = [name for name in _required(function) if name not in offered]
    if missing:
        raise ScorerFault(
            f"the function asks for {missing[0]!r}, but there is only {', '.join(sorted(offered))}"
        )
    if takes_all(function):
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


def asks_more(function: Reward) -> bool:
    """Whether a batch function takes any of `EXTRAS`."""
    return takes_all(function) or not set(EXTRAS).isdisjoint(_parameters(function))


def takes_all(function: Reward) -> bool:
    """Whether it has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look their module up by name; a file's neighbours are importable as in a script.
    sys.modules[name] = module
    sys.path.append(str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    """A name by which a process that the function starts can import its module, where the file's own is free."""
    stem = path.stem
    free = "." not in stem and stem not in sys.modules and _is_at(importlib.util.find_spec(stem), path)
    return stem if free else f"_slipstream_reward_{stem}"


def _is_at(spec: ModuleSpec | None, path: Path) -> bool:
    """Whether a name means nothing yet, or this very file, as where it lies in the working folder."""
    return spec is None or (spec.origin is not None and Path(spec.origin).absolute() == path.absolute())


def _import_mend(cause: str) -> str:
    if any(each in cause for each in _OUT_OF_MEMORY):
        return "raise memory_mb; torch needs 8192 or more"
    if "attempted relative import" in cause:
        return "write `from helpers import …`: the file's neighbours are importable by their names"
    return ""
