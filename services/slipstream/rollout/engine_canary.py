"""Whether an engine says what the learner said at the same version: digests vouch for bytes, this for their use."""

from __future__ import annotations

import asyncio
import math

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.base import Chunk, Engine, GroupRequest, Sampling
from slipstream.weights.manifest import Canary

SECONDS = 120.0


async def deviation(engine: Engine, version: int, canaries: list[Canary], attempt: int) -> float:
    """Largest difference between the engine's logprob of its likeliest next token and the learner's of the same.

    Infinite when that token is not among the learner's likeliest at all, is no number or does not come; 0 when there
    is nothing to compare, also because the engine has gone on to another version before it answered.

    Raises:
        SlipstreamError: The engine refused, or gave no answer in time.
    """
    worst = 0.0  # of those that this very version answered
    for number, canary in enumerate(canaries):
        name = f"canary-{version}-{attempt}-{number}"
        try:
            async with asyncio.timeout(SECONDS):
                answer = await _next_token(engine, name, canary)
        except TimeoutError as error:
            raise SlipstreamError(f"the engine gave no answer for {name} within {SECONDS:g} s") from error
        if answer is None or not math.isfinite(answer.logprobs[0]):
            return math.inf  # NaN weights end a row without a token
        if answer.version == version:
            expected = dict(zip(canary.token_ids, canary.logprobs, strict=True)).get(answer.token_ids[0])
            worst = max(worst, math.inf if expected is None else abs(answer.logprobs[0] - expected))
    return worst


async def _next_token(engine: Engine, name: str, canary: Canary) -> Chunk | None:
    sampling = Sampling(temperature=0.0, max_new_tokens=1, stop_ids=())
    request = GroupRequest(name, tuple(canary.prompt_ids), (0,), sampling)
    async for chunk in engine.generate(request):
        if chunk.token_ids:
            return chunk
    return None
