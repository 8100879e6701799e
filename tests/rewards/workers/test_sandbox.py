"""The pool of killable workers, with real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import Outcome
from slipstream.rewards.workers.sandbox import WorkerPool
from slipstream.rewards.workers.scoring_process import probe
from slipstream.rewards.workers.worker_wire import Setup

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PLUGIN = """
import os, sys, time

def reward(completion, task):
    if completion == "spin":
        while True: pass
    if completion == "eat":
        return len([bytes(10**7) for _ in range(10**6)])
    if completion == "die":
        os._exit(3)
    if completion == "print":
        print("x" * 1000); sys.stderr.write("y" * 1000); os.write(1, b"\\x05\\x00\\x00\\x00hello")
    if completion == "flood":
        while True: print("x" * 10000)
    if completion.startswith("daemon"):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "48161"])
            os._exit(0)
        time.sleep(0.3)
        while completion == "daemon spins": pass
    if completion == "child":
        if os.fork() == 0:
            time.sleep(600)
        while True: pass
    return float(len(completion))
"""

MakePool = Callable[..., WorkerPool]


@pytest.fixture
async def pool(reward_file: Callable[[str], str]) -> AsyncIterator[MakePool]:
    """Make pools that end with the test."""
    path = reward_file(PLUGIN)
    async with AsyncExitStack() as stack:

        async def make(timeout_seconds: float = 60.0, workers: int = 1, memory_mb: int = 512) -> WorkerPool:
            setup = Setup(use=f"{path}:reward", timeout_seconds=timeout_seconds, memory_bytes=memory_mb << 20)
            made = WorkerPool(setup, workers)
            stack.push_async_callback(made.close)
            await made.start()
            return made

        yield make  # type: ignore[misc]


async def score(pool: WorkerPool, completion: str) -> Outcome:
    return (await pool.score("p", [completion], {}))[0]


async def settled(pool: WorkerPool, workers: int) -> list[int]:
    """Process ids once every worker is back."""
    while len(pool.pids) < workers:  # noqa: ASYNC110  (ends with the test's time limit)
        await asyncio.sleep(0.01)
    return pool.pids


async def test_a_grader_that_hangs_is_killed_and_replaced(pool: MakePool) -> None:
    """Case 2: spin, ok, ok, spin, ok on two workers."""
    made = await pool(timeout_seconds=4.0, workers=2)
    before = made.pids
    outcomes = await asyncio.gather(*(score(made, text) for text in ("spin", "ok", "ok", "spin", "ok")))
    assert [outcome.status for outcome in outcomes] == ["timeout", "ok", "ok", "timeout", "ok"]
    after = await settled(made, 2)
    assert not set(before) & set(after)
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert (await score(made, "again")).value == 5.0


async def test_a_worker_that_eats_memory_is_stopped_at_its_limit(pool: MakePool) -> None:
    """Case 3: the service's own memory stays flat."""
    made = await pool()
    before, own = made.pids, psutil.Process().memory_info().rss
    assert (await score(made, "eat")).status == "memory"
    assert psutil.Process().memory_info().rss - own < 50 << 20
    assert await settled(made, 1) != before
    assert (await score(made, "ok")).value == 2.0


async def test_a_worker_that_dies_is_replaced(pool: MakePool) -> None:
    made = await pool()
    assert (await score(made, "die")).status == "worker_lost"
    assert (await score(made, "ok")).value == 2.0


async def test_a_worker_killed_while_idle_costs_one_job_at_most(pool: MakePool) -> None:
    made = await pool()
    os.kill(made.pids[0], signal.SIGKILL)
    assert (await score(made, "first")).status in ("worker_lost", "ok")
    assert (await score(made, "second")).value == 6.0


async def test_what_a_scorer_prints_does_not_reach_the_protocol(pool: MakePool) -> None:
    made = await pool()
    assert [(await score(made, "print")).value for _ in range(3)] == [5.0, 5.0, 5.0]


async def test_a_flood_of_output_is_stopped(pool: MakePool) -> None:
    made = await pool()
    outcome = await score(made, "flood")
    assert outcome.status == "worker_lost"
    assert "printed more than" in outcome.detail
    assert (await score(made, "ok")).value == 2.0


async def test_children_of_a_scorer_die_with_it(pool: MakePool) -> None:
    made = await pool(timeout_seconds=4.0)
    worker = psutil.Process(made.pids[0])
    scoring = asyncio.create_task(score(made, "child"))
    while not (children := worker.children()):  # noqa: ASYNC110  (ends with the test's time limit)
        await asyncio.sleep(0.01)
    assert (await scoring).status == "timeout"
    await settled(made, 1)
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "48161"]]


async def no_sleepers() -> None:
    async with asyncio.timeout(30):
        while sleepers():  # noqa: ASYNC110  (killed, and gone when the system has reaped it)
            await asyncio.sleep(0.05)


async def test_what_a_scorer_started_in_a_session_of_its_own_ends_at_its_time_limit(pool: MakePool) -> None:
    made = await pool(timeout_seconds=4.0)
    assert (await score(made, "daemon spins")).status == "timeout"
    await settled(made, 1)
    await no_sleepers()
    assert (await score(made, "ok")).value == 2.0


@pytest.mark.parametrize("end", ["close", "kill the worker"])
async def test_what_a_scorer_started_in_a_session_of_its_own_ends_with_it(pool: MakePool, end: str) -> None:
    made = await pool()
    assert (await score(made, "daemon")).value == 6.0
    assert len(sleepers()) == 1  # a helper may serve the next call
    if end == "close":
        await made.close()
    else:
        os.kill(made.pids[0], signal.SIGKILL)
    await no_sleepers()


async def test_a_cancelled_call_frees_its_worker(pool: MakePool) -> None:
    made = await pool(timeout_seconds=600.0)
    scoring = asyncio.create_task(score(made, "spin"))
    worker, idle = psutil.Process(made.pids[0]), psutil.Process(made.pids[0]).cpu_times().user
    while worker.cpu_times().user < idle + 0.05:  # noqa: ASYNC110  (ends with the test's time limit)
        await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert (await score(made, "ok")).value == 2.0
    assert not worker.is_running()


async def test_text_that_no_encoder_takes_is_scored(pool: MakePool) -> None:
    """Case 52: a lone surrogate becomes a replacement character on the way."""
    assert (await score(await pool(), "a\ud800")).value == 2.0


async def test_columns_that_no_encoder_takes_are_unscored(pool: MakePool) -> None:
    outcomes = await (await pool()).score("p", ["a"], {"answer": object()})
    assert outcomes[0].status == "exception"


async def test_closing_ends_every_process_and_what_waits(pool: MakePool) -> None:
    made = await pool(timeout_seconds=600.0)
    pid = made.pids[0]
    calls = [asyncio.create_task(score(made, "spin")), asyncio.create_task(score(made, "ok"))]
    await asyncio.sleep(0)
    await made.close()
    outcomes = await asyncio.gather(*calls)
    assert all(outcome.status in ("worker_lost", "start_failed") for outcome in outcomes)
    assert not psutil.pid_exists(pid)


async def test_workers_die_with_a_parent_that_is_killed(
    reward_file: Callable[[str], str], tmp_path: Path
) -> None:
    path = reward_file(PLUGIN)
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio\n"
        "from slipstream.rewards.workers.sandbox import WorkerPool\n"
        "from slipstream.rewards.workers.worker_wire import Setup\n"
        "async def main():\n"
        f"    pool = WorkerPool(Setup(use={path + ':reward'!r}, timeout_seconds=600), 1)\n"
        "    await pool.start()\n"
        "    print(pool.pids[0], flush=True)\n"
        "    await pool.score('p', ['daemon'], {})\n"
        "    print('scored', flush=True)\n"
        "    await pool.score('p', ['spin'], {})\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    worker = psutil.Process(int(await parent.stdout.readline()))
    assert await parent.stdout.readline() == b"scored\n"
    assert len(sleepers()) == 1
    parent.kill()
    await parent.wait()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    await no_sleepers()


async def test_a_scorer_too_large_for_its_memory_is_a_users_mistake(reward_file: Callable[[str], str]) -> None:
    path = reward_file("x = bytes(10**9)\ndef reward(completion): return 1.0")
    pool = WorkerPool(Setup(use=f"{path}:reward", memory_bytes=256 << 20), 2)
    with pytest.raises(UserError, match="raise memory_mb"):
        await pool.start()
    assert pool.pids == []


async def test_a_process_that_cannot_start_is_reported_and_leaves_nothing(
    pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job comes back unscored; once the system allows processes again, so does the pool."""
    made = await pool()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        assert (await score(made, "die")).status == "worker_lost"
        outcome = await score(made, "ok")
        assert outcome.status == "start_failed"
        assert "/nowhere/python" in outcome.detail
    while (await score(made, "ok")).value != 2.0:  # a restart begun under the broken system fails once more
        assert made.pids == []


async def test_a_worker_has_no_secret_in_its_environment_and_keeps_what_is_the_users(
    pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("JUDGE_KEY", "mine")
    found = psutil.Process((await pool()).pids[0]).environ()
    assert "hunter2" not in found.values()
    assert found["JUDGE_KEY"] == "mine"


@pytest.mark.parametrize("start", ["probe", "pool"])
async def test_a_worker_that_is_killed_while_it_loads_is_started_once_more(
    reward_file: Callable[[str], str], tmp_path: Path, start: str
) -> None:
    """A kernel that wants memory kills what loads; that is no mistake in the config."""
    once = f"""
import os, signal
if not os.path.exists({str(tmp_path / "killed")!r}):
    open({str(tmp_path / "killed")!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
def reward(completion, task):
    return 1.0
"""
    setup = Setup(use=f"{reward_file(once)}:reward", timeout_seconds=60.0, memory_bytes=512 << 20)
    if start == "probe":
        assert (await asyncio.to_thread(probe, setup)).form == "sample"
        return
    pool = WorkerPool(setup)
    try:
        await pool.start()
        assert [each.value for each in await pool.score("", ["x"], {})] == [1.0]
    finally:
        await pool.close()
