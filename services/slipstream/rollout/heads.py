"""The likeliest tokens beside each sampled one: flat, a fixed number a token, -inf where one lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.rollout.engines.base import Head

ROUNDING = 1e-3  # an engine's float32 may put a sure token's logprob so far above 0


@dataclass(slots=True)
class Heads:
    """Ids and logprobs of the heads of tokens in turn."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Heads]) -> Heads:
        """Several, one after the other."""
        made = cls()
        for part in parts:
            made.ids += part.ids
            made.logprobs += part.logprobs
        return made

    def extend(self, heads: Sequence[Head], tokens: int, count: int) -> bool:
        """Take in the heads of so many tokens, `count` of each; says whether they are usable."""
        if len(heads) != tokens:
            return False
        for head in heads:
            chosen = head[:count]
            if not chosen or not all(-math.inf < logprob <= ROUNDING for _, logprob in chosen):
                return False
            missing = count - len(chosen)
            self.ids += [*(token for token, _ in chosen), *[0] * missing]
            logprobs = [min(0.0, logprob) for _, logprob in chosen]
            self.logprobs += [*logprobs, *[-math.inf] * missing]
        return True

    def cut(self, first: int, last: int) -> Heads:
        """Entries `first` to `last`."""
        return Heads(self.ids[first:last], self.logprobs[first:last])
