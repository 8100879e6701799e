from __future__ import annotations

import asyncio

import pytest

from slipstream.lifecycle.life import FAULT_VARIABLE, Life, TaskDied


async def forever() -> None:
    await asyncio.Event().wait()


async def raising(error: Exception) -> None:
    raise error


async def nothing() -> None:
    return


async def test_a_dead_background_task_ends_the_process_with_its_cause():
    """Case 80."""
    told: list[BaseException] = []
    life = Life(told.append)

    async def service() -> None:
        life.watch("receive", raising(ValueError("broken")))
        await forever()

    with pytest.raises(ValueError, match="broken") as caught:
        await life.run(service())
    assert caught.value.__notes__ == ["in background task 'receive'"]
    assert told == [caught.value]


async def test_a_wait_is_cut_off_by_a_stop_alone():
    life, ended = Life(), []

    async def work(event: asyncio.Event) -> str:
        try:
            await event.wait()
        except asyncio.CancelledError:
            ended.append("cut off")
            raise
        return "done"

    ready = asyncio.Event()
    ready.set()
    assert await life.unless_stopped(work(ready)) == "done"
    waiting = asyncio.create_task(life.unless_stopped(work(asyncio.Event())))
    await asyncio.sleep(0)
    life.stop()
    assert await waiting is None
    assert ended == ["cut off"]
    with pytest.raises(ValueError, match="broken"):
        await life.unless_stopped(raising(ValueError("broken")))


async def test_a_background_task_that_ends_by_itself_is_a_fault():
    life = Life()

    async def service() -> None:
        life.watch("receive", nothing())
        await forever()

    with pytest.raises(TaskDied, match="'receive' ended by itself"):
        await life.run(service())


async def test_a_task_that_may_end_is_no_fault():
    life = Life()

    async def service() -> None:
        await life.watch("answer", nothing(), endless=False)

    await life.run(service())


async def test_the_first_cause_is_reported_not_what_follows_from_it():
    life = Life()

    async def service() -> None:
        life.watch("first", raising(ValueError("cause")))
        try:
            await forever()
        finally:
            raise KeyError("consequence")

    with pytest.raises(ValueError, match="cause"):
        await life.run(service())


async def test_a_stop_cuts_off_a_service_that_has_nothing_to_drain():
    """Case 104: a start-up that waits for something ends at once when asked to."""
    life = Life()
    closed = []

    async def service() -> None:
        asyncio.get_running_loop().call_soon(life.stop)
        try:
            await forever()
        finally:
            closed.append(True)

    await life.run(service())
    assert closed == [True]


async def test_a_stop_lets_a_service_drain_that_says_so():
    life = Life()
    drained = []

    async def service() -> None:
        life.drains()
        asyncio.get_running_loop().call_soon(life.stop)
        await life.wait_for_stop()
        await asyncio.sleep(0)
        drained.append(True)

    await life.run(service())
    assert drained == [True]


async def test_a_fault_while_draining_is_still_reported():
    life = Life()

    async def service() -> None:
        life.drains()
        life.stop()
        life.watch("late", raising(ValueError("late")), endless=False)
        await forever()

    with pytest.raises(ValueError, match="late"):
        await life.run(service())


async def test_background_tasks_are_gone_when_the_service_has_ended():
    life = Life()
    tasks = []

    async def service() -> None:
        tasks.append(life.watch("beat", forever()))
        await asyncio.sleep(0)

    await life.run(service())
    assert tasks[0].cancelled()


async def test_pause_ends_with_the_stop():
    life = Life()
    asyncio.get_running_loop().call_soon(life.closing)
    assert await life.pause(3600) is True


async def test_pause_ends_with_news():
    life, news = Life(), asyncio.Event()
    asyncio.get_running_loop().call_soon(news.set)
    assert await life.pause(3600, news) is False
    asyncio.get_running_loop().call_soon(life.stop)
    assert await life.pause(3600, asyncio.Event()) is True


async def test_pause_ends_with_its_time():
    assert await Life().pause(0.0) is False


async def test_an_injected_fault_kills_the_task_of_that_name_only(monkeypatch):
    monkeypatch.setenv(FAULT_VARIABLE, "beat")
    life = Life()

    async def service() -> None:
        await life.watch("other", nothing(), endless=False)
        life.watch("beat", forever())
        await forever()

    with pytest.raises(RuntimeError, match="fault injected into 'beat'"):
        await life.run(service())
