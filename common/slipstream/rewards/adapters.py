"""Reward functions in the signatures of other projects, called as these call them.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` for one sample. OpenRLHF:
`reward_func(queries, prompts, labels)` for a batch, where queries are prompts with their completions. Both are told
by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.rewards.base import READS_MARK, MissingColumn, Task, batch_reward, sample_reward

Reward = Callable[..., Any]

# Where each project's rows keep the right answer, the most particular first. `|` reads: any of them.
VERL_GOLD = "ground_truth|reward_model.ground_truth|answer"
OPENRLHF_GOLD = "labels|label|answer"


def of_verl(names: Sequence[str]) -> bool:
    """Whether parameters are those of verl's form."""
    return "solution_str" in names and "ground_truth" in names


def of_openrlhf(names: Sequence[str]) -> bool:
    """Whether parameters are those of OpenRLHF's form."""
    return "queries" in names and "completions" not in names


def adapt(function: Reward, names: Sequence[str], takes_all: bool) -> Reward:
    """A function of either form as one of ours; any other as it is.

    Args:
        function: The user's, with its options bound.
        names: Its parameters.
        takes_all: Whether it has `**kwargs`.
    """
    if of_verl(names):
        return _marked(sample_reward(_verl(function, names, takes_all)), function, VERL_GOLD)
    if of_openrlhf(names):
        gold = OPENRLHF_GOLD if "labels" in names else None
        return _marked(batch_reward(_openrlhf(function, names, takes_all)), function, gold)
    return function


def reach(columns: Mapping[str, Any], names: str) -> Any:
    """The first of the columns `a|b.c|d` that a row has; `b.c` is `c` within `b`.

    Raises:
        MissingColumn: It has none of them; the message names those it has.
    """
    for name in names.split("|"):
        value: Any = columns
        for key in (name,) if name in columns else name.split("."):
            value = value.get(key) if isinstance(value, Mapping) and key in value else None
        if value is not None:
            return value
    wanted = names.replace("|", " or ")
    raise MissingColumn(f"the row has no column {wanted!r}; it has {', '.join(columns) or 'none'}")


def _verl(function: Reward, names: Sequence[str], takes_all: bool) -> Reward:
    def score(completion: str, task: Task) -> Any:
        offered = {
            "data_source": task.columns.get("data_source", ""),
            "solution_str": completion,
            "ground_truth": reach(task.columns, VERL_GOLD),
            "extra_info": task.columns.get("extra_info") or {},
        }
        return function(**_taken(offered, names, takes_all, function))

    return score


def _openrlhf(function: Reward, names: Sequence[str], takes_all: bool) -> Reward:
    def score(prompts: list[Any], completions: list[str], **columns: Any) -> Any:
        rows = {name: values[0] for name, values in columns.items() if isinstance(values, list) and values}
        offered = columns | {"prompts": prompts}
        offered["queries"] = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        if "labels" in names:
            offered["labels"] = [reach(rows, OPENRLHF_GOLD)] * len(completions)
        result = function(**_taken(offered, names, takes_all, function))
        # newer releases return a dict, whose `rewards` are trained on
        return result["rewards"] if isinstance(result, Mapping) and "rewards" in result else result

    return score


def _taken(
    offered: Mapping[str, Any], names: Sequence[str], takes_all: bool, function: Reward
) -> dict[str, Any]:
    bound = getattr(function, "keywords", {})
    return {
        name: value for name, value in offered.items() if (takes_all or name in names) and name not in bound
    }


def _marked(adapted: Reward, function: Reward, gold: str | None) -> Reward:
    declared = getattr(getattr(function, "func", function), READS_MARK, ())
    setattr(adapted, READS_MARK, (*declared, *([gold] if gold else [])))
    return adapted
