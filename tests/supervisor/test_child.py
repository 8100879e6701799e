from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from slipstream.supervisor.child import Child, ProcessSpec

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


async def start(tmp_path: Path, code: str, **more) -> Child:
    spec = ProcessSpec("c", [sys.executable, "-c", code], **more)
    return await Child.start(spec, tmp_path / "c.log", echo=None)


async def until(condition) -> None:
    """Poll; the test's own time limit is the deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"


GRANDCHILD = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); "


async def test_output_is_kept_with_the_last_line(tmp_path):
    child = await start(tmp_path, "print('one'); print('the cause')")
    assert await child.wait() == 0
    assert (tmp_path / "c.log").read_text() == "one\nthe cause\n"
    assert child.last_line == "the cause"


async def test_an_endless_line_does_not_stop_the_child(tmp_path):
    child = await start(tmp_path, "import sys; sys.stdout.write('x' * (3 << 20)); print(); print('end')")
    assert await child.wait() == 0
    assert child.last_line == "end"


async def test_the_cause_of_an_end_is_kept_but_not_passed_on(tmp_path):
    """The supervisor says it, at the end and once."""
    passed = []
    spec = ProcessSpec("c", [sys.executable, "-c", "print('one'); print('\\x1ethe cause')"])
    child = await Child.start(spec, tmp_path / "c.log", passed.append)
    assert await child.wait() == 0
    assert passed == [b"one\n"]
    assert (tmp_path / "c.log").read_text() == "one\nthe cause\n"
    assert child.last_line == "the cause"


async def test_a_log_that_cannot_be_written_does_not_stop_the_child(tmp_path):
    (tmp_path / "c.log").mkdir()
    child = await start(tmp_path, "print('x' * 200000); print('end')")
    assert await child.wait() == 0
    assert child.last_line == "end"


async def test_what_a_child_started_ends_with_it(tmp_path):
    """Case 103."""
    child = await start(tmp_path, GRANDCHILD)
    await child.wait()
    pid = int((tmp_path / "c.log").read_text())
    await until(lambda: gone(pid))


async def test_a_child_that_ignores_sigterm_is_killed_with_its_group(tmp_path):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = await start(tmp_path, code + GRANDCHILD + "import time; time.sleep(1000)")
    await until(lambda: child.last_line)
    assert await child.stop(0.05) == -signal.SIGKILL
    pid = int(child.last_line)
    await until(lambda: gone(pid))


async def test_a_child_that_drains_ends_with_its_own_code(tmp_path):
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True); "
    )
    child = await start(tmp_path, code + "import time; time.sleep(1000)")
    await until(lambda: child.last_line)
    assert await child.stop(20.0) == 7
    assert await child.stop(20.0) == 7  # harmless when repeated


async def test_another_program_dies_with_its_parent(tmp_path):
    """Case 103: also when the parent is killed and can do nothing about it."""
    parent = f"""
import asyncio, pathlib
from slipstream.supervisor.child import Child, ProcessSpec
async def main():
    log_file = pathlib.Path({str(tmp_path)!r}) / "s.log"
    child = await Child.start(ProcessSpec("s", ["sleep", "1000"], foreign=True), log_file)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    child = await start(tmp_path, parent)
    await until(lambda: child.last_line)
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: gone(int(child.last_line)))
