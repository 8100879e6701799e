from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading

import pytest

from slipstream.errors import EXIT_FAULT, EXIT_HALTED, EXIT_OK, EXIT_USER, LedgerError, RunHalted, UserError
from slipstream.lifecycle import process
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.process import run_process


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            UserError("run.root: no such disk", "choose another"),
            EXIT_USER,
            "run.root: no such disk; choose another",
        ),
        (RunHalted("0 of 9 groups carry signal"), EXIT_HALTED, "run halted: 0 of 9 groups carry signal"),
        (LedgerError("the ledger is away"), EXIT_FAULT, "the ledger is away"),
        (KeyError("x"), EXIT_FAULT, "KeyError: 'x'"),
        (AssertionError(), EXIT_FAULT, "AssertionError: AssertionError"),
    ],
)
def test_every_end_has_its_code_and_one_line(error, code, line, caplog):
    async def service(life: Life) -> None:
        raise error

    with caplog.at_level(logging.INFO, "slipstream"):
        assert run_process(service) == code
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_dead_background_task_is_named(caplog):
    """Case 80."""

    async def die() -> None:
        raise ValueError("broken pipe")

    async def service(life: Life) -> None:
        life.watch("receive", die())
        await asyncio.Event().wait()

    assert run_process(service) == EXIT_FAULT
    assert caplog.records[-1].getMessage() == "ValueError: broken pipe (in background task 'receive')"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("drains", [False, True])
def test_a_signal_ends_a_service_with_0(number, drains):
    """Cases 99 and 104."""

    async def service(life: Life) -> None:
        if drains:
            life.drains()
        os.kill(os.getpid(), number)
        await (life.wait_for_stop() if drains else asyncio.Event().wait())

    assert run_process(service) == EXIT_OK


def test_a_process_without_its_supervisor_ends_where_it_stands(monkeypatch):
    """What it would drain to has gone as well; its clean-up still runs."""
    monkeypatch.setattr(process, "orphaned", lambda: True)
    cleaned = []

    async def service(life: Life) -> None:
        life.drains()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    assert run_process(service, save_seconds=600.0) == EXIT_OK
    assert cleaned


def test_a_stop_leaves_time_to_save(monkeypatch):
    monkeypatch.setattr(process, "exit_now", lambda code: pytest.fail("ended before it had saved"))

    async def service(life: Life) -> None:
        life.drains()
        os.kill(os.getpid(), signal.SIGTERM)
        await life.wait_for_stop()
        await asyncio.sleep(0.05)

    assert run_process(service, drain_seconds=0.0, save_seconds=600.0) == EXIT_OK


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(process, "exit_now", codes.append)
    return codes


def test_a_second_interrupt_ends_at_once(ends):
    """Case 104."""

    async def service(life: Life) -> None:
        life.drains()
        loop = asyncio.get_running_loop()
        os.kill(os.getpid(), signal.SIGINT)
        await life.wait_for_stop()
        seen = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, seen.set)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR2)
        await seen.wait()

    run_process(service)
    assert ends == [EXIT_FAULT]


def test_a_second_sigterm_changes_nothing(ends):
    async def service(life: Life) -> None:
        life.drains()
        os.kill(os.getpid(), signal.SIGTERM)
        await life.wait_for_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)

    assert run_process(service) == EXIT_OK
    assert ends == []


def test_a_drain_that_passes_its_deadline_ends_the_process_even_when_the_loop_is_stuck(monkeypatch):
    stuck = threading.Event()
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        stuck.set()

    monkeypatch.setattr(process, "exit_now", end)

    async def service(life: Life) -> None:
        life.drains()
        os.kill(os.getpid(), signal.SIGTERM)
        await life.wait_for_stop()
        stuck.wait()  # blocks the event loop itself

    run_process(service, drain_seconds=0.01)
    assert codes == [EXIT_FAULT]


def test_a_service_that_does_not_let_go_after_a_fault_is_ended_with_the_cause(monkeypatch, caplog):
    stuck = threading.Event()
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        stuck.set()

    monkeypatch.setattr(process, "exit_now", end)

    async def halt() -> None:
        raise RunHalted("enough")

    async def service(life: Life) -> None:
        life.watch("look", halt())
        try:
            await asyncio.Event().wait()
        finally:
            stuck.wait()

    run_process(service, drain_seconds=0.01)
    assert codes == [EXIT_HALTED]
    assert any("run halted: enough" in record.getMessage() for record in caplog.records)


def test_a_thread_that_still_works_is_not_waited_for():
    release = threading.Event()

    async def service(life: Life) -> None:
        asyncio.get_running_loop().run_in_executor(None, release.wait)
        raise RunHalted("enough")

    assert run_process(service) == EXIT_HALTED
    release.set()


def test_sigterm_before_there_is_a_service_ends_with_0(ends):
    """As process 1 of a container there is no default for it, and loading libraries takes seconds."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        process.end_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ends == [EXIT_OK]
