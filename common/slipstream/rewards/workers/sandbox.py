"""A pool of killable worker processes behind an asyncio call.

Every limit is enforced from here: a worker that passes its time or output limit, runs out of memory or dies is
killed with all that it started and replaced, and its job comes back with a status. An idle pool only waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import MessageError, SlipstreamError, UserError
from slipstream.rewards.base import Outcome, Status
from slipstream.rewards.outcomes import outcome_of
from slipstream.rewards.workers.scoring_process import START_SECONDS, WorkerChild, check_ready
from slipstream.rewards.workers.worker_wire import (
    LENGTH,
    NOTHING,
    Beside,
    Kind,
    Ready,
    ScoreJob,
    ScoreReply,
    Setup,
    check_length,
    pack,
    unpack,
)
from slipstream.text import repair

OUTPUT_BYTES = 1 << 20
WAIT_SECONDS = 600.0
# An async function keeps its own time limit per sample; the pool's, for a blocked loop, comes after it.
_GRACE_SECONDS = 1.0

_logger = logging.getLogger(__name__)


class WorkerPool:
    """Workers that all hold the same scorer.

    Callers wait for a free worker in turn, each for at most `WAIT_SECONDS`; how many may wait is the caller's
    to bound (`Scorers` does). A worker that does not last serves one job; its successor is started at once.

    Args:
        setup: The scorer and its limits.
        workers: Number of processes.
        grace: Give async functions a second beyond the limit that they keep themselves.
    """

    def __init__(self, setup: Setup, workers: int = 2, grace: bool = False) -> None:
        self._setup = setup
        self._limit = setup.timeout_seconds + (_GRACE_SECONDS if grace else 0.0)
        self._workers = [_Worker(setup) for _ in range(workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._numbers = itertools.count()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start every worker and wait until its scorer is loaded.

        Raises:
            UserError: The scorer can't be loaded.
        """
        starts = [asyncio.create_task(worker.start()) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await self.close()
            await asyncio.gather(*starts, return_exceptions=True)  # each reaps its own process
            raise

    async def close(self) -> None:
        """Kill every worker; calls under way come back as lost."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def score(
        self,
        prompt: str,
        completions: Sequence[str],
        columns: Mapping[str, Any],
        beside: Beside = NOTHING,
    ) -> list[Outcome]:
        """One outcome per completion, out of one call of the scorer; fails only by being cancelled."""
        job = ScoreJob(
            number=next(self._numbers),
            prompt=repair(prompt),
            completions=[repair(text) for text in completions],
            columns=dict(columns),
            beside=beside,
        )
        try:
            frame = pack(job)
        except MessageError as error:
            return [Outcome(status="exception", detail=str(error))] * len(completions)
        outcomes = await self._score(job, frame)
        return outcomes if isinstance(outcomes, list) else [outcomes] * len(completions)

    async def _score(self, job: ScoreJob, frame: bytes) -> list[Outcome] | Outcome:
        """The outcomes, or the one that stands for all."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                worker = await self._idle.get()
        except TimeoutError:
            return Outcome(status="start_failed", detail=f"no worker became free within {WAIT_SECONDS:g} s")
        reusable = False
        try:
            if worker.pid is None:
                await self._revive(worker)
            outcomes = await worker.ask(frame, job, self._limit)
            reusable = isinstance(outcomes, list) and worker.lasting and not _out_of_memory(outcomes)
        except (SlipstreamError, OSError) as error:
            return Outcome(status="start_failed", detail=str(error))
        finally:
            if reusable:
                self._idle.put_nowait(worker)
            else:
                self._replace(worker)
        return outcomes

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        task = asyncio.create_task(self._restart(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _restart(self, worker: _Worker) -> None:
        try:
            await worker.stop()
            await self._revive(worker)
        except (SlipstreamError, OSError) as error:
            # The next job tries again, and reports the cause if that fails too.
            if not self._closed:
                _logger.warning("reward worker of %s did not restart: %s", self._setup.use, error)
        finally:
            self._idle.put_nowait(worker)

    async def _revive(self, worker: _Worker) -> None:
        if self._closed:
            raise SlipstreamError("the pool is closed")
        await worker.start()


def _out_of_memory(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.status == "memory" for outcome in outcomes)


class _Worker:
    """One process and its two streams; `pid` is None while there is no usable process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._child: WorkerChild | None = None
        self._streams: list[asyncio.StreamWriter] = []
        self._drain: asyncio.Task[None] | None = None
        self._printed = bytearray()
        self._print_count = 0
        self._told = False
        self.pid: int | None = None
        self.lasting = True

    async def start(self) -> None:
        """Start the process and wait for its scorer; one that is killed without a word is started once more.

        Raises:
            UserError: The scorer can't be loaded.
        """
        try:
            answer = await self._load()
            if answer is None and not self._printed:
                await self.stop()
                answer = await self._load()
            ready = check_ready(self._setup, answer, bytes(self._printed))
        except TimeoutError:
            await self.stop()
            raise UserError(f"scorer {self._setup.use!r}: loading took more than {START_SECONDS:g} s") from None
        except BaseException:
            await self.stop()
            raise
        self.pid, self.lasting = ready.pid, ready.lasting
        self._tell(ready)

    async def _load(self) -> Ready | None:
        """A new process's answer to the setup; None when it ended before."""
        async with asyncio.timeout(START_SECONDS):
            await self._connect(WorkerChild(self._setup.isolated))
            self._writer.write(pack(self._setup))
            return await self._read(Ready)

    def _tell(self, ready: Ready) -> None:
        if ready.holds and not self._told:
            self._told = True
            level = logging.INFO if ready.lasting else logging.WARNING
            _logger.log(level, "%s: %s", self._setup.use, ready.holds)

    async def _connect(self, child: WorkerChild) -> None:
        self._child = child
        self._reset_output()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=child.control)
        self._streams.append(self._writer)
        output, output_writer = await asyncio.open_unix_connection(sock=child.output)
        self._streams.append(output_writer)
        self._drain = asyncio.create_task(self._drain_output(output))

    async def ask(self, frame: bytes, job: ScoreJob, limit: float) -> list[Outcome] | Outcome:
        """Outcomes of a job, or the one outcome of a call that failed; then the process is of no more use."""
        self._reset_output()
        try:
            async with asyncio.timeout(limit):
                self._writer.write(frame)
                await self._writer.drain()
                reply = await self._read(ScoreReply)
        except TimeoutError:
            return Outcome(status="timeout", detail=f"took more than {limit:g} s")
        except (ConnectionError, MessageError) as error:
            return Outcome(status="worker_lost", detail=str(error))
        if reply is None:
            return self._lost()
        if reply.number != job.number or len(reply.outcomes) != len(job.completions):
            return Outcome(status="worker_lost", detail="the worker answered another job")
        return [outcome_of(outcome) for outcome in reply.outcomes]

    def kill(self) -> None:
        """Kill the process at once."""
        self.pid = None
        if self._child is not None:
            self._child.kill()

    async def stop(self) -> None:
        """Kill the process, wait for its end, and close the streams."""
        self.kill()
        child, self._child = self._child, None
        if child is None:
            return
        if self._drain is not None:
            self._drain.cancel()
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()
            with contextlib.suppress(OSError):
                await stream.wait_closed()
        await asyncio.shield(asyncio.to_thread(child.reap))

    async def _read(self, kind: type[Kind]) -> Kind | None:
        try:
            head = await self._reader.readexactly(LENGTH.size)
            return unpack(await self._reader.readexactly(check_length(LENGTH.unpack(head)[0])), kind)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None

    async def _drain_output(self, output: asyncio.StreamReader) -> None:
        """Keep the end of what the process prints; one that prints too much in one job is killed."""
        with contextlib.suppress(ConnectionError):
            while chunk := await output.read(1 << 16):
                self._print_count += len(chunk)
                self._printed = (self._printed + chunk)[-2000:]
                if self._print_count > OUTPUT_BYTES:
                    self.kill()

    def _reset_output(self) -> None:
        if self._printed:
            _logger.debug("%s printed: %s", self._setup.use, self._printed.decode(errors="replace").strip())
        self._printed.clear()
        self._print_count = 0

    def _lost(self) -> Outcome:
        """What became of a process that ended within a job, by its own last words."""
        if self._print_count > OUTPUT_BYTES:
            return Outcome(status="worker_lost", detail=f"printed more than {OUTPUT_BYTES} bytes")
        lines = self._printed.decode(errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else "no message"
        status: Status = "memory" if last.startswith("MemoryError") else "worker_lost"
        return Outcome(status=status, detail=f"the worker process ended ({last})")
