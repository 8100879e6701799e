"""The engine contract: what a rollout replica asks of whatever generates its tokens.

An engine serves exactly one complete version at a time. It samples groups, streams tokens as chunks that are
each of one version, and swaps weights between decode steps while its sequences in flight go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slipstream.protocol.messages import Finish

Head = tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: `temperature` 0 is greedy; `stop_ids` end a completion and belong to it.

    A greedy token carries the logprob that it has at temperature 1. The token that completes one of `stop_strings`
    is a completion's last. `top_logprobs` asks for the likeliest tokens beside each sampled one.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to sample `len(seeds)` times; `request_id` is unique in the replica's life.

    `prefixes` are tokens that samples have already, one tuple a sample (empty: it begins), or none at all. They
    were sampled elsewhere: they are computed like the prompt, count towards `max_new_tokens` and are not streamed.
    Such a sample has the seed that it had; an engine whose random numbers begin with the request, instead of going
    by a token's place, must mix the prefix's length into it, or the sample draws its first numbers again.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    prefixes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.prefixes and len(self.prefixes) != len(self.seeds):
            raise ValueError(f"{len(self.prefixes)} prefixes for {len(self.seeds)} samples")

    def prefix(self, sample: int) -> tuple[int, ...]:
        """What a sample has already."""
        return self.prefixes[sample] if self.prefixes else ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sample, all sampled by `version`; `finish` is set on the sample's last chunk.

    `logprobs` are natural logs under the distribution that was sampled from (after temperature). An empty
    completion is one chunk without tokens and with a finish reason. `heads` holds, where it was asked for, the
    likeliest ids of each token's distribution with their logprobs, likeliest first. `kept_cache` says that the
    tokens may have attended to keys and values that older versions computed.
    """

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    heads: tuple[Head, ...] = ()
    kept_cache: bool = False


class ServedWeights(Protocol):
    """One complete, verified version as mapped from the publisher; valid until `release`."""

    @property
    def version(self) -> int: ...

    @property
    def tensors(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """Read-only arrays by Hugging Face name, tied names resolved to one array; bfloat16 comes as uint16."""
        ...

    def release(self) -> None:
        """Say that nothing reads the arrays any more; harmless when repeated."""
        ...


class Engine(Protocol):
    """A generator. Methods are called from one event loop; heavy work happens off it."""

    @property
    def follows(self) -> bool:
        """Whether `swap` changes what is served; if not, `version` is set once by `start`."""
        ...

    @property
    def version(self) -> int | None:
        """Version being served, or None before the first swap."""
        ...

    @property
    def free_slots(self) -> int:
        """How many more sequences can be decoded at once."""
        ...

    async def start(self) -> None: ...

    def check_running(self) -> None:
        """Look whether the engine can go on; a service asks before it takes work for it.

        Raises:
            SlipstreamError: It ended by itself and does not start again, with the cause, or is not started.
        """
        ...

    def generate(self, request: GroupRequest) -> AsyncIterator[Chunk]:
        """Stream the group's tokens; ends when every sample has finished or the request was aborted.

        A sample whose logprob is not finite is ended with "abort", without that token. Leaving the stream early
        ends the request.

        Raises:
            SlipstreamError: No version is served yet, the id is in use, the prompt does not fit, or the engine
                died; the message says why.
        """
        ...

    async def swap(self, weights: ServedWeights) -> None:
        """Serve another version from the next decode step on; returns once it is served.

        Sequences in flight continue. The engine releases the weights once it reads them no more.

        Raises:
            WeightsError: They do not fit the model; they are released and the version served stays.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields a last chunk with finish "abort" for each unfinished sample.

        That chunk carries what the sample has and was not handed on yet, so that it can go on elsewhere.
        """
        ...

    async def drain(self, seconds: float) -> None:
        """Let what is in flight finish for at most `seconds`, then abort the rest. New requests are refused."""
        ...

    async def close(self) -> None:
        """Abort everything, stop the worker and free memory; harmless when repeated."""
        ...
