"""Reward functions in the signatures of other projects, called as these call them.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` for one sample, or the same in the plural
(`solution_strs`, ...) for a batch. OpenRLHF: `reward_func(queries, prompts, labels)` for a batch, where queries are
prompts with their completions. All are told by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.rewards.base import (
    READS_MARK,
    Form,
    MissingColumn,
    Outcome,
    Task,
    batch_reward,
    sample_reward,
)
from slipstream.text import opened

Reward = Callable[..., Any]

# Where each project's rows keep the right answer, the most particular first. `|` reads: any of them.
VERL_GOLD = "ground_truth|reward_model.ground_truth|answer"
OPENRLHF_GOLD = "labels|label|answer"
# Where anybody's rows do.
ANY_GOLD = f"answer|{VERL_GOLD}|{OPENRLHF_GOLD}|solution|target"

_VERL = {"solution_str", "ground_truth"}
_VERL_BATCH = {"solution_strs", "ground_truths"}
_OPENRLHF = {"queries"}
# What these forms are handed and no option may be called.
HANDED = (*_VERL, *_VERL_BATCH, *_OPENRLHF)


def foreign_form(names: Sequence[str]) -> Form | None:
    """The form of a function of another project, by its parameters; None where it is none of those."""
    if "completions" in names or "completion" in names:
        return None
    if _VERL.issubset(names):
        return "sample"
    return "batch" if _VERL_BATCH.issubset(names) or _OPENRLHF.issubset(names) else None


def adapt(function: Reward, names: Sequence[str], takes_all: bool) -> Reward:
    """A function of another project's form as one of ours; any other as it is.

    Args:
        function: The user's, with its options bound.
        names: Its parameters.
        takes_all: Whether it has `**kwargs`.
    """
    if foreign_form(names) is None:
        return function
    call = _caller(function, names, takes_all)
    if _VERL.issubset(names):
        return _marked(sample_reward(_verl(call)), function, VERL_GOLD)
    if _VERL_BATCH.issubset(names):
        return _marked(batch_reward(_verl_batch(call)), function, VERL_GOLD)
    labels = "labels" in names
    return _marked(batch_reward(_openrlhf(call, labels)), function, OPENRLHF_GOLD if labels else None)


def reach(columns: Mapping[str, Any], names: str) -> Any:
    """The first of the columns `a|b.c|d` that a row has; `b.c` is `c` within `b`, also where `b` is JSON text.

    Raises:
        MissingColumn: It has none of them; the message names those it has.
    """
    for name in names.split("|"):
        value: Any = columns
        for key in (name,) if name in columns else name.split("."):
            value = opened(value)
            value = value.get(key) if isinstance(value, Mapping) and key in value else None
        if value is not None:
            return value
    wanted = names.replace("|", " or ")
    raise MissingColumn(f"the row has no column {wanted!r}; it has {', '.join(columns) or 'none'}")


def _verl(call: Reward) -> Reward:
    def score(completion: str, task: Task) -> Any:
        return call(
            data_source=task.columns.get("data_source", ""),
            solution_str=completion,
            ground_truth=reach(task.columns, VERL_GOLD),
            extra_info=task.columns.get("extra_info") or {},
        )

    return score


def _verl_batch(call: Reward) -> Reward:
    def score(completions: list[str], **columns: Any) -> Any:
        row, count = _row(columns), len(completions)
        return call(
            data_sources=[row.get("data_source", "")] * count,
            solution_strs=completions,
            ground_truths=[reach(row, VERL_GOLD)] * count,
            extra_infos=[row.get("extra_info") or {}] * count,
        )

    return score


def _openrlhf(call: Reward, labels: bool) -> Reward:
    def score(prompts: list[Any], completions: list[str], **columns: Any) -> Any:
        offered = columns | {"prompts": prompts}
        offered["queries"] = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        if labels:
            offered["labels"] = [reach(_row(columns), OPENRLHF_GOLD)] * len(completions)
        result = call(**offered)
        if hasattr(result, "__await__"):
            return _later(result, len(completions))
        return _told(result, len(completions))

    return score


async def _later(result: Any, count: int) -> Any:
    return _told(await result, count)


def _told(result: Any, count: int) -> Any:
    """Newer releases return a dict, whose `rewards` are trained on and whose `scores` and `extra_logs` are shown."""
    if not isinstance(result, Mapping) or "rewards" not in result:
        return result
    rewards, logs = result["rewards"], result.get("extra_logs")
    shown = {"scores": result.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
    lists = {str(name): each for name, each in shown.items() if hasattr(each, "__len__") and len(each) == count}
    if not lists or not hasattr(rewards, "__len__") or len(rewards) != count:
        return rewards
    return [
        Outcome(value=rewards[index], metrics={name: each[index] for name, each in lists.items()})
        for index in range(count)
    ]


def _row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The row of columns that are lists of one entry per completion, all the same."""
    return {name: values[0] for name, values in columns.items() if isinstance(values, list) and values}


def _caller(function: Reward, names: Sequence[str], takes_all: bool) -> Reward:
    """Calls the function with those arguments that it takes and that its options do not hold."""
    bound = getattr(function, "keywords", {})

    def call(**offered: Any) -> Any:
        taken = {name for name in offered if (takes_all or name in names) and name not in bound}
        return function(**{name: value for name, value in offered.items() if name in taken})

    return call


def _marked(adapted: Reward, function: Reward, gold: str | None) -> Reward:
    declared = getattr(getattr(function, "func", function), READS_MARK, ())
    setattr(adapted, READS_MARK, (*declared, *([gold] if gold else [])))
    return adapted
