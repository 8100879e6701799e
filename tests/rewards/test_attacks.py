"""Programs that a model wrote to get out, each for real: contained, scored 0, and the next one is scored as ever."""

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.errors import UserError
from slipstream.rewards.apart import trial
from slipstream.rewards.apart.family import descendants, held_bytes
from slipstream.rewards.base import RewardSpec, Scored
from slipstream.rewards.scorers import Scorers

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="walls are Linux's"),
]
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or trial.held().walls.kind != "bubblewrap",
    reason="bubblewrap is not here, or may not run: apt install bubblewrap",
)
GOOD = "def f(x): return x + 1"
TESTS = {"tests": "assert f(1) == 2"}
Attack = Callable[..., Any]


@pytest.fixture
async def attack() -> AsyncIterator[Attack]:
    """Score a program, see that a good one is scored 1.0 after it, and give back what the first got."""
    made: list[Scorers] = []

    async def run(code: str, seconds: float = 60.0, memory_mb: int = 512) -> Scored:
        loaded = Scorers.load([RewardSpec("python", timeout_seconds=seconds, memory_mb=memory_mb)])
        made.append(loaded)
        await loaded.start()
        scored = (await loaded.score_group("p", [code + "\n" + GOOD], TESTS))[0]
        assert not scored.unscored, scored.detail
        assert (await loaded.score_group("p", [GOOD], TESTS))[0].reward == 1.0
        return scored

    yield run
    for loaded in made:
        await loaded.close()


def contained(code: str) -> str:
    """A program that does something and passes only if it was refused."""
    lines = "\n".join(f"    {line}" for line in code.strip().splitlines())
    return (
        f"import os\ntry:\n{lines}\nexcept (OSError, KeyError): pass\nelse: raise AssertionError('it got out')"
    )


@needs_bubblewrap
async def test_a_program_cannot_reach_the_ledgers_socket(attack: Attack, tmp_path: Path) -> None:
    path = str(tmp_path / "redis.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        code = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({path!r})\ns.send(b'FLUSHALL')"
        assert (await attack(contained(code))).reward == 1.0
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
async def test_a_program_opens_no_socket(attack: Attack, family: str) -> None:
    assert (await attack(contained(f"import socket\nsocket.socket(socket.{family})"))).reward == 1.0


async def test_a_program_reads_no_password_from_other_processes(attack: Attack) -> None:
    code = """
import glob
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        told = open(path, "rb").read()
    except OSError:
        continue
    assert b"pytest" not in told and b"PASSWORD" not in told, path
"""
    assert (await attack(code)).reward == 1.0


@needs_bubblewrap
async def test_a_program_sees_no_run_folder_and_no_home(attack: Attack, tmp_path: Path) -> None:
    secret = tmp_path / "keys" / "curve"
    secret.parent.mkdir()
    secret.write_text("secret")
    here = Path(__file__)
    for path in (secret, here, Path("/root/.bashrc"), Path("/etc/shadow"), Path("/etc/passwd")):
        assert (await attack(contained(f"open({str(path)!r}).read()"))).reward == 1.0


@needs_bubblewrap
async def test_a_program_writes_nowhere_but_in_two_small_places(attack: Attack) -> None:
    packages = Path(pytest.__file__).parent
    places = ["/", "/usr/lib", "/etc", "/dev", "/slipstream", "/root", str(packages), "/proc/sys/kernel"]
    for place in places:
        assert (await attack(contained(f"open({place + '/x'!r}, 'w')"))).reward == 1.0
    assert (
        await attack("for place in ('/tmp', '/dev/shm', '.'): open(place + '/x', 'w').write('x')")
    ).reward == 1.0
    assert "x" not in os.listdir("/tmp") + os.listdir("/dev/shm")


@needs_bubblewrap
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
async def test_a_program_cannot_fill_the_disk(attack: Attack, place: str) -> None:
    code = f"for n in range(40):\n    with open(f'{place}/{{n}}', 'wb') as file: file.write(bytes(10 << 20))"
    assert (await attack(contained(code))).reward == 1.0


@needs_bubblewrap
async def test_a_program_makes_no_memory_that_nobody_holds(attack: Attack) -> None:
    assert (await attack(contained("os.memfd_create('x')"))).reward == 1.0
    code = "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) < 0: raise OSError"
    assert (await attack(contained(code))).reward == 1.0


async def test_a_program_makes_no_namespaces_of_its_own(attack: Attack) -> None:
    for call in ("unshare(0x10000000)", "unshare(0x20000)", "syscall(56, 0x10000011, 0, 0, 0, 0)"):
        code = f"import ctypes\nif ctypes.CDLL(None).{call} < 0: raise OSError"
        assert (await attack(contained(code))).reward == 1.0


def sleepers(number: int) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "status"])
    return [p for p in found if p.info["cmdline"] == ["sleep", str(number)] and p.info["status"] != "zombie"]


async def gone(number: int) -> None:
    async with asyncio.timeout(30):
        while sleepers(number):  # noqa: ASYNC110  (killed, and gone when the system has reaped it)
            await asyncio.sleep(0.05)


ESCAPE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{number}"])
    os._exit(0)
time.sleep(0.3)
"""


async def test_a_program_that_leaves_its_process_group_is_ended_with_its_job(attack: Attack) -> None:
    """The worker lives on where it may; what the program left does not."""
    assert (await attack(ESCAPE.format(number=48151))).reward == 1.0
    await gone(48151)


async def test_what_left_is_ended_when_the_time_is_up(attack: Attack) -> None:
    scored = await attack(ESCAPE.format(number=48152) + "while True: pass", seconds=4.0)
    assert (scored.reward, scored.flags) == (0.0, ("python:timeout",))
    await gone(48152)


async def test_a_program_that_forks_400_processes_scores_0(attack: Attack) -> None:
    code = "import os, time\nfor n in range(400):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\ntime.sleep(60)"
    before = len(psutil.pids())
    scored = await attack(code, seconds=30.0)
    assert (scored.reward, scored.flags in ((), ("python:worker_lost",))) == (0.0, True)
    assert len(psutil.pids()) < before + 60


async def test_a_program_that_holds_5_times_its_memory_in_many_processes_scores_0(attack: Attack) -> None:
    code = """
import os, time
for n in range(10):
    if os.fork() == 0:
        held = b"x" * (120 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, held_bytes(descendants(os.getpid()), 0))
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    scored = await attack(code, seconds=50.0, memory_mb=256)
    looking.cancel()
    assert (scored.reward, scored.flags) == (0.0, ("python:memory",))
    assert most < 3 * (256 << 20)  # 5 times its memory would be 1.2 GiB


async def test_memory_that_processes_share_counts_once(attack: Attack) -> None:
    code = """
import os, time
held = b"x" * (80 << 20)
children = []
for n in range(8):
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
"""
    assert (await attack(code, memory_mb=256)).reward == 1.0


async def test_a_program_that_floods_its_output_scores_0(attack: Attack) -> None:
    scored = await attack("import os\nwhile True: os.write(1, b'x' * 65536)", seconds=30.0)
    assert (scored.reward, scored.flags) == (0.0, ("python:worker_lost",))


@needs_bubblewrap
async def test_useful_programs_run_as_before(attack: Attack) -> None:
    code = """
import asyncio, collections, datetime, itertools, json, math, multiprocessing, os, random, re, subprocess, tempfile
import threading
import numpy
assert numpy.arange(3).sum() == 3
with tempfile.TemporaryFile() as file: file.write(b"x")
assert subprocess.run(["echo", "hi"], capture_output=True).stdout == b"hi\\n"
async def twice(x): return 2 * x
assert asyncio.run(twice(2)) == 4
threading.Thread(target=print).start()
queue = multiprocessing.get_context("fork").SimpleQueue()
if os.fork() == 0:
    queue.put(3)
    os._exit(0)
assert queue.get() == 3
"""
    scored = await attack(code)
    assert (scored.reward, scored.detail) == (1.0, "")


@pytest.mark.parametrize("kind", ["namespaces", "limits"])
async def test_where_bubblewrap_is_missing_the_start_says_what_holds(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from slipstream.rewards.apart import walls\n"
        f"walls.ways = lambda: [way for way in [walls.Walls({kind!r}), walls.Walls('limits')]]\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)]))
    loaded = Scorers.load([RewardSpec("python", timeout_seconds=60)])
    try:
        with caplog.at_level(logging.INFO):
            await loaded.start()
        line = next(r for r in caplog.records if "code from the model is held by" in r.message)
        assert line.levelno == logging.WARNING
        assert kind in line.message
        assert "bwrap is not installed" in line.message
        escape = ESCAPE.format(number=48153)
        scored = await loaded.score_group("p", [GOOD, f"{escape}\n{GOOD}", "def f(x): return 0"], TESTS)
        assert [sample.reward for sample in scored] == [1.0, 1.0, 0.0]
        await gone(48153)
    finally:
        await loaded.close()


async def test_sandbox_required_refuses_to_start_without_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    loaded = Scorers.load([RewardSpec("python", timeout_seconds=60)], sandbox="required")
    with pytest.raises(UserError, match=r"reward.sandbox is required.*apt install bubblewrap"):
        await loaded.start()


@needs_bubblewrap
async def test_sandbox_required_starts_with_bubblewrap(caplog: pytest.LogCaptureFixture) -> None:
    loaded = Scorers.load([RewardSpec("python", timeout_seconds=60)], sandbox="required")
    with caplog.at_level(logging.INFO):
        await loaded.start()
    await loaded.close()
    assert "held by bubblewrap" in caplog.text
