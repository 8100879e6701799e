"""Follows the learner's weights: learns of a version by asking, verifies it aside, swaps it in whole."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from slipstream.errors import BaseMismatch, SlipstreamError, TransportTimeout, UserError, WeightsError
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import ENDED
from slipstream.lifecycle.life import Life
from slipstream.rollout.engines.base import Chunk, Engine, GroupRequest, Sampling
from slipstream.rollout.first_weights import FirstWeights
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.weights.base import Mapped, Subscriber
from slipstream.weights.manifest import Canary, Manifest, decode_manifest

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


log = logging.getLogger("slipstream.rollout")
POLL_SECONDS = 0.05
LONGEST_POLL_SECONDS = 0.5
RETRY_SECONDS = 1.0


class WeightsFollower:
    """Keeps the newest complete version staged beside the one being served."""

    def __init__(
        self,
        ledger: Ledger,
        subscriber: Subscriber,
        engine: Engine,
        metrics: RolloutMetrics | None = None,
        host: str = "",
        canary_bound: float | None = None,
        frame_seconds: float = 10.0,
    ) -> None:
        self._ledger = ledger
        self._subscriber = subscriber
        self._engine = engine
        self._metrics = metrics or RolloutMetrics()
        self._staged: Mapped | None = None
        self._swapping = -1
        self._fetching = asyncio.Lock()  # a subscriber has one set of buffers
        self._host, self._bound = host, canary_bound
        self._first = FirstWeights(ledger, frame_seconds)
        self._served: Manifest | None = None
        self._deviation: float | None = None
        self._tried = 0
        self._closed = False
        self._complained = ""
        self.swap_seconds = 0.0
        self.on_news: Callable[[], None] = lambda: None
        """Called when a version was announced, for then the learner has room again, and when it is here."""

    async def follow(self, life: Life) -> None:
        """Stage each newer version as it is announced; one that cannot be had is asked for again."""
        heard = time.monotonic()
        while not life.stopping:
            announced = await self._ledger.manifest(self._newest())
            usable = True
            if announced is not None:
                heard = time.monotonic()
                self.on_news()
                usable = await self._stage(announced[1])
                self.on_news()
            await life.pause(_patience(time.monotonic() - heard) if usable else RETRY_SECONDS)

    async def swap_if_newer(self) -> int | None:
        """Swap the staged version in, if there is one; the number moves after the engine serves it.

        Returns the version, which the engine may have lost again by the time that it is read.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            return None
        started, manifest = time.monotonic(), staged.manifest
        self._swapping = staged.version  # neither staged nor served for a while, and not to be fetched again
        try:
            await self._engine.swap(staged)
        finally:
            self._swapping = -1
        self._served, self._deviation = manifest, None
        self.swap_seconds = time.monotonic() - started
        return manifest.version

    async def trusted(self) -> bool:
        """Whether the engine says what the learner said at this version, within the bound.

        An engine that gives no answer is believed: its digests were right, and its own faults have their own end.
        """
        if self._bound is None or self._served is None:
            return True
        self._tried += 1
        try:
            found = await deviation(self._engine, self._served.version, self._served.canary, self._tried)
        except SlipstreamError as error:
            log.warning("the canary of version %d was not heard: %s", self._served.version, error)
            return True
        self._deviation = found
        return found <= self._bound

    async def serve_anew(self) -> None:
        """Have the newest version whole and from its source, and serve that.

        Raises:
            WeightsError: `weights_mismatch`: the engine differs from the learner after that as well.
        """
        wrong, deviated = self._engine.version, self._deviation
        log.error(
            "weights_mismatch: at version %s the engine differs from the learner by %.3g, the bound is %s; "
            "its groups go back and the weights are pulled anew",
            wrong,
            deviated,
            self._bound,
        )
        self._metrics.fetches.labels("mismatch").inc()
        async with self._fetching:
            self._subscriber.forget()
        announced = await self._ledger.manifest()
        if announced is None or not await self._stage(announced[1]) or await self.swap_if_newer() is None:
            raise WeightsError(f"weights_mismatch at version {wrong}, and no weights can be had to mend it")
        if not await self.trusted():
            raise WeightsError(
                f"weights_mismatch: version {self._engine.version}, pulled anew, still differs from the learner "
                f"by {self._deviation:.3g}, over weights.canary_bound {self._bound}"
            )

    def note(self) -> dict[str, Any]:
        """What others should see in the ledger: where weights pass on, and what is served how well."""
        served = self._served
        return {
            "host": self._host,
            "relay": self._subscriber.relay,
            "fingerprint": served.digest if served is not None else "",
            "deviation": self._deviation,
        }

    def close(self) -> None:
        """Let go of what is staged and not served."""
        self._closed = True
        if self._staged is not None:
            self._staged.release()
            self._staged = None
        self._subscriber.close()

    def _newest(self) -> int:
        """What needs no fetching; an engine that has lost a version for a while has its weights still."""
        held = (
            self._engine.version,
            self._served and self._served.version,
            self._staged and self._staged.version,
        )
        return max(self._swapping, *(-1 if version is None else version for version in held))

    async def _stage(self, manifest: bytes) -> bool:
        """Fetch and verify a version; False when it cannot be had now.

        Raises:
            BaseMismatch: It never can be had here.
            RunHalted: None was ever had, for longer than is sensible.
        """
        started = time.monotonic()
        try:
            async with self._fetching:
                fetched = await asyncio.to_thread(self._subscriber.fetch, decode_manifest(manifest))
        except BaseMismatch:
            raise
        except (WeightsError, TransportTimeout, UserError) as error:
            self._metrics.fetches.labels("failed").inc()
            await self._complain(str(error))
            if self._newest() < 0:
                await self._first.failed(str(error))
            return False
        self._metrics.fetches.labels("verified").inc()
        self._metrics.fetched.inc(fetched.manifest.layout.total_bytes)
        self._metrics.fetch_seconds.inc(time.monotonic() - started)
        if self._closed:
            fetched.release()
            return False
        older, self._staged = self._staged, fetched
        if older is not None:
            older.release()
        return True

    async def _complain(self, reason: str) -> None:
        """Say once why a version cannot be had: published again meanwhile, torn, out of reach, or no room for it.

        The same answer comes until the learner publishes again. A learner whose run has ended takes its weights
        away with it, and nobody waits for them any more.
        """
        if reason == self._complained or (await self._ledger.state()).status in ENDED:
            return
        self._complained = reason
        log.info("waiting for usable weights, serving version %s: %s", self._engine.version, reason)


def _patience(quiet: float) -> float:
    """Seconds until the next look: the longer no version came, the less a look soon is worth."""
    return min(LONGEST_POLL_SECONDS, max(POLL_SECONDS, 0.02 * quiet))
