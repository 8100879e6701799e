"""Feeds sinks, each from a bounded queue by a thread of its own, so that none slows the run or another one."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from slipstream.secrets import hide
from slipstream.telemetry.sinks.sink import Sampled, Sink, SinkRun

log = logging.getLogger("slipstream.telemetry")
WAITING = 256
CLOSE_SECONDS = 15.0
FAILURES = 10
"""So many failed calls in a row give a sink up: a server may be away for a while, in a run of days."""

Make = Callable[[SinkRun], Sink]


@dataclass(frozen=True)
class _Shown:
    step: int
    values: Mapping[str, float]
    samples: Sequence[Sampled]


class Sinks:
    """What the steps are sent to; with none, nothing is done.

    Args:
        run: What each is opened with, at the first step that it is sent.
        makes: How to open each, by its setting.
    """

    def __init__(self, run: SinkRun, makes: Mapping[str, Make]) -> None:
        self._run = run
        self._feeds = [_Feed(name, make) for name, make in makes.items()]

    def begin(self, step: int) -> None:
        """Say from which step the run goes on; to be called before anything is written."""
        self._run = replace(self._run, step=step)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled] = ()) -> None:
        """Send numbers of a step; never waits. What a full queue cannot take is left out, and that is told."""
        for feed in self._feeds:
            feed.put(self._run, _Shown(step, dict(values), tuple(samples)))

    def close(self) -> None:
        """Let what waits be written, for some seconds at most, all of them together."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.wait(deadline)


class _Feed:
    """One sink with its queue and its thread."""

    def __init__(self, name: str, make: Make) -> None:
        self._name = name
        self._make = make
        self._sink: Sink | None = None
        self._queue: queue.Queue[tuple[SinkRun, _Shown] | None] = queue.Queue(WAITING)
        self._ended = threading.Event()
        self._failed = 0
        self._failed_in_a_row = 0
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, run: SinkRun, shown: _Shown) -> None:
        if self._given_up:
            return
        try:
            self._queue.put_nowait((run, shown))
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning("%s does not keep up: steps are left out of it", self._name)

    def end(self) -> None:
        """What waits is still written."""
        self._ended.set()
        with contextlib.suppress(
            queue.Full
        ):  # then the thread finds out by itself, when nothing waits any more
            self._queue.put_nowait(None)

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s is not done after %g s: its last steps may be missing", self._name, CLOSE_SECONDS)

    @property
    def _given_up(self) -> bool:
        return self._failed_in_a_row >= FAILURES

    def _work(self) -> None:
        while not self._given_up and (item := self._next()) is not None:
            self._guarded(f"step {item[1].step}", functools.partial(self._write, *item))
        if self._sink is not None:
            self._guarded("its end", self._sink.close)

    def _next(self) -> tuple[SinkRun, _Shown] | None:
        return None if self._ended.is_set() and self._queue.empty() else self._queue.get()

    def _write(self, run: SinkRun, shown: _Shown) -> None:
        if self._sink is None:  # here, since many ask a server, which the start of a run must not wait for
            self._sink = self._make(run)
        self._sink.write(shown.step, shown.values, shown.samples)

    def _guarded(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            # Somebody else's library and somebody else's server: whatever it is, training goes on.
            self._tell(what, error)
        else:
            self._failed_in_a_row = 0

    def _tell(self, what: str, error: BaseException) -> None:
        """Say it, ever less often: a run has no end."""
        self._failed += 1
        self._failed_in_a_row += 1
        cause = f"{type(error).__name__}: {hide(str(error))}"
        if self._given_up:
            log.warning("%s is given up after %d failures in a row: %s", self._name, FAILURES, cause)
        elif self._failed & (self._failed - 1) == 0:
            log.warning("%s goes without %s: %s", self._name, what, cause)
