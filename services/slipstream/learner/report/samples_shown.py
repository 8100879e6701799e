"""Samples of a step for a person to read: each token with its version and how far learner and sampler disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.learner.intake.wait import Batch
from slipstream.protocol.messages import Group, Sample

HEAD_TOKENS, TAIL_TOKENS = 1024, 512  # of a longer completion the middle is left out
_LONGEST_CHARACTER = 8  # tokens that one character may take, in a byte-level vocabulary
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """What turns ids into text."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


def chosen(groups: Sequence[Group], step: int, count: int) -> tuple[int, list[int]]:
    """Which group of a batch is shown, and which of its samples: the best, the worst, then those in between.

    Groups take turns by step; one whose rewards differ goes before one that teaches nothing.
    """
    turn = [(step + offset) % len(groups) for offset in range(len(groups))]
    index = next((each for each in turn if groups[each].informative), turn[0])
    samples = groups[index].samples
    order = sorted(
        range(len(samples)), key=lambda each: (samples[each].reward is None, -(samples[each].reward or 0.0))
    )
    picked: list[int] = []
    while order and len(picked) < count:
        picked.append(order.pop(-1 if len(picked) % 2 else 0))
    return index, sorted(picked)


def shown_step(
    batch: Batch,
    choice: tuple[int, list[int]],
    learner_logprobs: Mapping[int, Sequence[float]],
    decoder: TokenDecoder,
    step: int,
    version: int,
) -> dict[str, Any]:
    """One line for the samples file.

    Args:
        batch: The step's groups.
        choice: What `chosen` picked.
        learner_logprobs: By the sample's number in the whole batch; a sample that had no gradient has none.
        decoder: The tokenizer.
        step: The step.
        version: The learner's version while it trained.
    """
    index, picked = choice
    group, arrays = batch[index]
    before = sum(len(other.samples) for other, _ in batch[:index])
    starts = [0]
    for sample in group.samples:
        starts.append(starts[-1] + sample.tokens)
    shown = []
    for each in picked:
        ids = arrays.token_ids[starts[each] : starts[each + 1]].tolist()
        sampler = arrays.logprobs[starts[each] : starts[each + 1]].tolist()
        learner = learner_logprobs.get(before + each)
        gap = None if learner is None else [round(a - b, 4) for a, b in zip(learner, sampler, strict=False)]
        shown.append(_shown(group.samples[each], ids, sampler, gap, decoder) | {"index": each})
    return {
        "step": step,
        "version": version,
        "ticket": group.ticket,
        "attempt": group.attempt,
        "prompt": group.prompt,
        "columns": {
            name: value for name, value in group.columns.items() if isinstance(value, str | int | float)
        },
        "samples": shown,
    }


def _shown(
    sample: Sample, ids: list[int], sampler: list[float], gap: list[float] | None, decoder: TokenDecoder
) -> dict[str, Any]:
    cut = len(ids) > HEAD_TOKENS + TAIL_TOKENS
    keep = [*range(HEAD_TOKENS), *range(len(ids) - TAIL_TOKENS, len(ids))] if cut else range(len(ids))
    versions = [version for version, count in sample.versions for _ in range(count)]
    return {
        "tokens": pieces([ids[at] for at in keep], decoder),
        "versions": _runs([versions[at] for at in keep]),
        "logprobs": [round(sampler[at], 4) for at in keep],
        "gap": None if gap is None else [gap[at] for at in keep],
        "omitted": len(ids) - len(keep),
        "length": sample.tokens,
        "finish": sample.finish,
        "reward": sample.reward,
        "components": sample.components,
        "unscored": sample.unscored,
    }


def pieces(ids: Sequence[int], decoder: TokenDecoder) -> list[str]:
    """The text of each token, special ones included; a character of several tokens stands at the last of them."""
    found: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = decoder.decode(waiting, skip_special=False)
        if text.endswith(_REPLACEMENT) and len(waiting) < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text)
        waiting = []
    if waiting:
        found[-1] = decoder.decode(waiting, skip_special=False)
    return found


def _runs(values: Sequence[int]) -> list[list[int]]:
    """[value, count] in turn."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
