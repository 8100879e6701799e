"""Copies of checkpoints elsewhere (`learner.checkpoint.upload`), beside everything else.

    <url>/<run>/step-00000120/       as the folder on disk: its files, MANIFEST.json, and COMPLETE last

A folder without COMPLETE is not a checkpoint. Training never waits for an upload; one that fails is counted, told and
tried again, until a newer checkpoint takes its place. Nothing that was uploaded is ever removed, but the marker of a
step that is uploaded anew.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.learner.checkpoint.checkpoint_files import MARKER
from slipstream.learner.checkpoint.finding import sealed
from slipstream.learner.checkpoint.trainer_state import weights_only
from slipstream.run.stores import open_store
from slipstream.telemetry.metrics import LearnerMetrics

log = logging.getLogger("slipstream.learner")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 300.0


class Uploader:
    """Uploads the newest checkpoint that was offered; `run` must be running.

    Attributes:
        busy: The step whose folder is being read; it must be neither pruned nor thinned meanwhile.
        failed: Attempts that failed.
    """

    def __init__(
        self, url: str, run: str, checkpoints: Path, metrics: LearnerMetrics, wait_s: float = _FIRST_WAIT_S
    ) -> None:
        """Args:
            url: Where to. run: Name of the run. checkpoints: Folder of all its checkpoints.
            metrics: Counts what was uploaded and what failed.
            wait_s: Time before the second attempt, seconds; each further one waits twice as long.

        Raises:
            UserError: As `stores.open_store`.
        """
        self._system, root = open_store(url, "learner.checkpoint.upload")
        self._url = f"{url.rstrip('/')}/{run}"
        self._root = f"{root}/{run}"
        self._metrics = metrics
        self._wait_s = wait_s
        self._offered: tuple[int, Path] | None = None
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.busy: int | None = None
        self.failed = 0
        for step, path in sealed(checkpoints)[:1]:  # one that an earlier start of the learner may have left
            self.offer(step, path)

    def offer(self, step: int, path: Path) -> None:
        """Have a checkpoint uploaded, instead of an older one that still waits."""
        self._offered = (step, path)
        self._idle.clear()
        self._news.set()

    async def settled(self, seconds: float) -> bool:
        """Wait for the newest at most so long; whether it is there."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%s does not have the newest checkpoint after %.0f s", self._url, seconds)
            return False
        return True

    async def run(self) -> None:
        """Upload what is offered, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._offered is not None
            await self._upload(*self._offered)
            if not self._news.is_set():
                self._idle.set()

    async def _upload(self, step: int, path: Path) -> None:
        """Try until it succeeds, until it is gone, or until a newer one is offered."""
        wait = self._wait_s
        while not await self._attempt(step, path):
            await self._pause(wait)
            if self._news.is_set():
                return
            wait = min(2 * wait, _LONGEST_WAIT_S)

    async def _attempt(self, step: int, path: Path) -> bool:
        """Whether there is nothing more to do for it."""
        self.busy = step
        try:
            await asyncio.to_thread(self._copy, path)
        except Exception as error:  # noqa: BLE001
            if not (path / MARKER).exists():
                log.info("checkpoint at step %d was pruned before it was uploaded", step)
                return True
            self.failed += 1
            self._metrics.uploads.labels("failed").inc()
            line = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning(
                "checkpoint at step %d not uploaded to %s (%d failed): %s", step, self._url, self.failed, line
            )
            return False
        finally:
            self.busy = None
        self._metrics.uploads.labels("done").inc()
        log.info("checkpoint at step %d uploaded to %s", step, self._url)
        return True

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    def _copy(self, path: Path) -> None:
        target = f"{self._root}/{path.name}"
        marker = f"{target}/{MARKER}"
        sealed_as = (path / MARKER).read_bytes()
        if self._system.exists(marker):
            if self._system.cat_file(marker) == sealed_as or weights_only(path):
                return  # also when its moments were taken out here since: the copy that has them stays
            self._system.rm_file(marker)  # the step was trained anew
        for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != MARKER):
            place = f"{target}/{file.relative_to(path).as_posix()}"
            self._system.makedirs(place.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(file), place)
        if (path / MARKER).read_bytes() != sealed_as:
            raise SlipstreamError("it was written anew meanwhile, so that its files may be of both")
        self._system.pipe_file(marker, sealed_as)
