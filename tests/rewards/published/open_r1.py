"""open-r1, unsloth: format rewards by regular expressions over messages, None for what does not apply."""

import re

from neighbour import THINK


def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(THINK, content, re.DOTALL) else 0.0 for content in contents]


def accuracy_reward(
    completions: list[list[dict[str, str]]], solution: list[str], **kwargs
) -> list[float | None]:
    found = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [None if not gold else float(bool(each) and each[-1] == gold) for each, gold in zip(found, solution)]
