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
from slipstream.lifecycle.life import Life, Service

log = logging.getLogger("slipstream.process")
_PR_SET_PDEATHSIG = 1


def run_process(service: Service, drain_seconds: float = 4.0) -> int:
    """Run a service to its end; returns the exit code, as named in `slipstream.errors`."""
    try:
        asyncio.run(_guarded(service, drain_seconds))
    except UserError as error:
        log.error("%s", error)
        return EXIT_USER
    except RunHalted as error:
        log.error("run halted: %s", error)
        return EXIT_HALTED
    except SlipstreamError as error:
        log.error("%s", _with_notes(error))
        return EXIT_FAULT
    except Exception as error:  # noqa: BLE001
        # The outer edge: whatever it was, say it in one line; the trace is for whoever debugs.
        log.error("%s", _with_notes(error))
        log.debug("%s", "".join(traceback.format_exception(error)))
        return EXIT_FAULT
    return EXIT_OK


def exit_now(code: int) -> None:
    """End without waiting for stray threads; everything worth keeping has been closed by now."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


async def _guarded(service: Service, drain_seconds: float) -> None:
    life = Life()
    _install_signals(life, drain_seconds)
    await life.run(service(life))


def _install_signals(life: Life, drain_seconds: float) -> None:
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        if life.stopping and number == signal.SIGINT:
            log.warning("second Ctrl-C: ending at once")
            exit_now(EXIT_FAULT)
        if not life.stopping:
            log.info("%s: draining", signal.Signals(number).name)
            _end_after(drain_seconds)
        life.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)


def _end_after(seconds: float) -> None:
    """A drain has a deadline, also when the event loop is stuck: a thread ends the process."""

    def end() -> None:
        log.error("drain passed its %.1f s: ending at once", seconds)
        exit_now(EXIT_FAULT)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM when the parent dies (Linux), and end if it is dead already.

    The parent names itself in SLIPSTREAM_PARENT, so that one that died before this call is noticed.
    """
    parent = os.environ.get("SLIPSTREAM_PARENT")
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        exit_now(EXIT_FAULT)


def _with_notes(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    text = str(error) or type(error).__name__
    head = text if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {text}"
    return f"{head} ({notes})" if notes else head
