"""The outer edge of a process: signals, the parent's death, and one exit code with one line of cause."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import traceback

from slipstream.errors import EXIT_FAULT, EXIT_HALTED, EXIT_OK, EXIT_USER, RunHalted, SlipstreamError, UserError
from slipstream.lifecycle.descriptors import raise_limit
from slipstream.lifecycle.life import Life, Service

log = logging.getLogger("slipstream.process")
_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SLIPSTREAM_PARENT"


def run_process(
    service: Service, drain_seconds: float = 4.0, save_seconds: float = 0.0, with_run: bool = False
) -> int:
    """Run a service to its end; returns the exit code, as named in `slipstream.errors`.

    Work that still runs in threads is not waited for.

    Args:
        service: What the process does.
        drain_seconds: Longest time between its stop, or a fault, and its end.
        save_seconds: More time for a stop that somebody asked for, to save what was reached.
        with_run: End with 0 once the run has ended, for a process that nobody watches.
    """
    raise_limit()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_guarded(service, drain_seconds, save_seconds, with_run))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def exit_now(code: int) -> None:
    """End without waiting for stray threads; everything worth keeping has been closed by now."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Deadline:
    """Ends the process, also when the event loop is stuck: a thread of its own watches the time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def start(self, code: int, cause: str, more_seconds: float = 0.0) -> None:
        """From now on the process has its drain time left; the first cause counts."""
        if self._timer is None:
            seconds = self._seconds + more_seconds
            self._timer = threading.Timer(seconds, self._end, (code, cause, seconds))
            self._timer.daemon = True
            self._timer.start()

    def hurry(self) -> None:
        """Give what is left no more than the plain drain time from now."""
        if self._timer is not None:
            code, cause, _ = self._timer.args
            self._timer.cancel()
            self._timer = None
            self.start(code, cause)

    def cancel(self) -> None:
        """The process has ended in order."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, code: int, cause: str, seconds: float) -> None:
        log.error("%s: not ended after %.1f s, ending at once", cause, seconds)
        exit_now(code)


async def _guarded(service: Service, drain_seconds: float, save_seconds: float, with_run: bool) -> int:
    deadline = _Deadline(drain_seconds)
    life = Life(
        on_failure=lambda error: deadline.start(*_verdict(error)),
        on_end=lambda: deadline.start(EXIT_FAULT, "drain"),
        with_run=with_run,
    )
    _install_signals(life, deadline, save_seconds)
    try:
        await life.run(service(life))
    except Exception as error:  # noqa: BLE001
        # The outer edge: whatever it was, say it in one line; the trace is for whoever debugs.
        code, cause = _verdict(error)
        log.error("%s", cause, extra={"last_word": code in (EXIT_USER, EXIT_HALTED)})
        log.debug("%s", "".join(traceback.format_exception(error)))
        return code
    finally:
        deadline.cancel()
    return EXIT_OK


def _verdict(error: BaseException) -> tuple[int, str]:
    """Exit code and line for what ended a process."""
    if isinstance(error, UserError):
        return EXIT_USER, str(error)
    if isinstance(error, RunHalted):
        return EXIT_HALTED, f"run halted: {error}"
    return EXIT_FAULT, _with_notes(error)


def _install_signals(life: Life, deadline: _Deadline, save_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    before: list[int] = []

    def asked(number: int) -> None:
        if before and number == signal.SIGINT:
            log.warning("second signal: ending at once")
            exit_now(EXIT_FAULT)
        if not before:
            log.info("%s: draining", signal.Signals(number).name)
            deadline.start(EXIT_FAULT, "drain", save_seconds)
        if alone := orphaned():
            deadline.hurry()
        before.append(number)
        life.stop(at_once=alone)  # what a drain needs, such as the ledger, goes with the supervisor

    for number in stop_signals():
        loop.add_signal_handler(number, asked, number)


def stop_signals() -> list[signal.Signals]:
    """What asks a process to stop: a closed terminal and Slurm's warning, too, unless they are ignored (`nohup`)."""
    more = [each for each in (signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(each) is not signal.SIG_IGN]
    return [signal.SIGTERM, signal.SIGINT, *more]


def end_on_sigterm() -> None:
    """Until a service takes the signals over, those that ask for a stop end the process with 0: nothing has begun.

    The kernel gives process 1 of a container no default for SIGTERM, so it would be ignored while libraries load.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, frame: exit_now(EXIT_OK))


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM when the parent dies (Linux), and end if it is dead already.

    The parent names itself in SLIPSTREAM_PARENT, so that one that died before this call is noticed.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if orphaned():
        exit_now(EXIT_FAULT)


def orphaned() -> bool:
    """Whether the supervisor that started this process is gone."""
    parent = os.environ.get("SLIPSTREAM_PARENT")
    return parent is not None and os.getppid() != int(parent)


def _with_notes(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    text = str(error) or type(error).__name__
    head = text if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {text}"
    return f"{head} ({notes})" if notes else head
