"""The contract of a group: what each process on its way asks of it, in one function and on the terms of the run.

A process that has the run's key may still be wrong: another build, another tokenizer, a bug, a break-in. What is no
group of this run is refused at each door, by name, before anything is stored or trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from slipstream.config.schema import Config
from slipstream.errors import MessageError
from slipstream.ledger.records import RunTerms
from slipstream.protocol.frames import Frames, Logprobs
from slipstream.protocol.messages import ENGINE_REASONS, Group, GroupArrays, Sample, check_run, decode_group
from slipstream.rewards.base import MAX_COMPONENTS, MAX_NAME, MAX_REWARD, Reason

UNSCORED_REASONS = ENGINE_REASONS | frozenset(get_args(Reason))
LEAST_LOGPROB = (
    -1e4
)  # no token that is less likely is ever sampled, and sums over a batch stay far from infinity


@dataclass(frozen=True)
class GroupTerms:
    """What a group of the run can hold. A number that is 0, and no names, ask for nothing.

    Attributes:
        run: Name of the run.
        vocabulary: Token ids are below it.
        context: Most tokens of a prompt and one completion together.
        completion: Most tokens of one completion.
        group_size: Samples of a training group; an evaluation item has one.
        head: How many likeliest tokens go with each sampled one of a training group.
        rewards: Names of the reward functions; components are these and `function.part`, metrics `function/name`.
    """

    run: str | None
    vocabulary: int = 0
    context: int = 0
    completion: int = 0
    group_size: int = 0
    head: int = 0
    rewards: tuple[str, ...] = ()


class Contract:
    """Checks groups against the terms of one run."""

    def __init__(self, terms: GroupTerms) -> None:
        self.terms = terms
        self._parts = tuple(f"{name}{mark}" for name in terms.rewards for mark in "./")
        self._most = len(terms.rewards) * (1 + 2 * MAX_COMPONENTS)

    def read(self, frames: Frames, *, scored: bool) -> tuple[Group, GroupArrays]:
        """The group of these frames; the arrays are views on them.

        Args:
            frames: As they came over the wire or from the disk.
            scored: Whether it has been through reward; before that nothing is said of its rewards, for they do not
                count.

        Raises:
            MessageError: It is no group of this run; the message names the field and the bound.
        """
        group, arrays = decode_group(frames)
        self.check(group, arrays, scored=scored)
        return group, arrays

    def check(self, group: Group, arrays: GroupArrays, *, scored: bool) -> None:
        """As `read`, for header and arrays that tell one story (`check_group`); raises `MessageError`."""
        check_run(group, self.terms.run)
        self._check_shape(group)
        self._check_lengths(group, arrays)
        self._check_ids(arrays)
        _check_logprobs(arrays)
        if scored:
            for index, sample in enumerate(group.samples):
                self._check_rewards(sample, f"samples[{index}]")

    def _check_shape(self, group: Group) -> None:
        train = group.kind == "train"
        size, head = (self.terms.group_size, self.terms.head) if train else (1, 0)
        if size and len(group.samples) != size:
            raise MessageError(f"samples: {len(group.samples)} samples, a group of this run has {size}")
        if self.terms.group_size and group.head != head:
            raise MessageError(f"head: {group.head} likeliest tokens for each, this run has {head}")

    def _check_lengths(self, group: Group, arrays: GroupArrays) -> None:
        prompt, terms = len(arrays.prompt_ids), self.terms
        if not prompt:
            raise MessageError("prompt_ids: empty, nothing predicts the first token")
        longest = max(sample.tokens for sample in group.samples)
        if terms.completion and longest > terms.completion:
            raise MessageError(f"samples: {longest} tokens in one, at most {terms.completion} are sampled")
        if terms.context and prompt + longest > terms.context:
            raise MessageError(f"samples: {prompt} + {longest} tokens, the context holds {terms.context}")

    def check_ids(self, name: str, ids: npt.NDArray[np.int32]) -> None:
        """See that all are ids of the model; raises `MessageError`."""
        size = self.terms.vocabulary
        if size and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(((ids < 0) | (ids >= size)).argmax())
            raise MessageError(f"{name}[{wrong}]: id {ids.flat[wrong]}, the model's vocabulary has {size}")

    def _check_ids(self, arrays: GroupArrays) -> None:
        self.check_ids("prompt_ids", arrays.prompt_ids)
        self.check_ids("token_ids", arrays.token_ids)
        if arrays.head_ids is not None:
            self.check_ids("head_ids", arrays.head_ids)

    def _check_rewards(self, sample: Sample, path: str) -> None:
        if (sample.reward is None) != bool(sample.unscored):
            raise MessageError(f"{path}: has either a reward or a reason why it has none")
        if sample.unscored and sample.unscored not in UNSCORED_REASONS:
            raise MessageError(f"{path}.unscored: {sample.unscored[:40]!r} is no reason of ours")
        if not -MAX_REWARD <= (sample.reward or 0.0) <= MAX_REWARD:
            raise MessageError(f"{path}.reward: {sample.reward} is beyond {MAX_REWARD:g}")
        if self._parts and len(sample.components) > self._most:
            raise MessageError(f"{path}.components: {len(sample.components)}, at most {self._most}")
        for name, value in sample.components.items():
            self._check_component(name, value, f"{path}.components")

    def _check_component(self, name: str, value: float | None, path: str) -> None:
        rewards = self.terms.rewards
        part = next((each for each in self._parts if name.startswith(each)), name)
        if rewards and name not in rewards and not 0 < len(name) - len(part) <= MAX_NAME:
            raise MessageError(f"{path}: {name[:130]!r} is of no reward of this run: {', '.join(rewards)}")
        if not -MAX_REWARD <= (value or 0.0) <= MAX_REWARD:
            raise MessageError(f"{path}.{name}: {value} is beyond {MAX_REWARD:g}")


def contract_of(config: Config, run: RunTerms) -> Contract:
    """The contract of a run: what the config says of its groups, and what the run's record says of its model."""
    bounds = [each for each in (config.model.context_length, run.positions) if each]
    return Contract(
        GroupTerms(
            run=config.run.name,
            vocabulary=run.vocabulary,
            context=min(bounds, default=0),
            completion=config.sampling.max_new_tokens,
            group_size=config.batch.group_size,
            head=config.sampling.top_logprobs,
            rewards=tuple(function.component for function in config.reward.functions),
        )
    )


def _check_logprobs(arrays: GroupArrays) -> None:
    _check_bounds("logprobs", arrays.logprobs, LEAST_LOGPROB)
    if arrays.head_logprobs is None:
        return
    _check_bounds("head_logprobs", arrays.head_logprobs, -np.inf)  # which pads a shorter head
    if not np.isfinite(arrays.head_logprobs[:, :1]).all():
        raise MessageError("head_logprobs: a token has no likeliest one")


def _check_bounds(name: str, values: Logprobs, least: float) -> None:
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    if not least <= low <= high <= 0.0:
        wrong = high if high > 0.0 else low
        raise MessageError(f"{name}: {wrong:g} is no logprob, {least:g} to 0 are")
