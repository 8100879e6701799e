"""Shared memory of vLLM's processes: what is ours goes, also after a kill; what is another's stays."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from slipstream.rollout.engines.vllm import vllm_memory
from slipstream.rollout.engines.vllm.vllm_memory import ChildMemory, mapped
from slipstream.weights.host import segments

CHILD = """
import mmap, sys
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 4096) for file in files]
print("mapped", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def files(tmp_path):
    """Two that a child of this process maps, one of a stranger's, and one of another name."""
    made = [tmp_path / name for name in ("psm_1a2b", "sem.mp-x_9", "psm_ffff", "other")]
    for path in made:
        path.write_bytes(bytes(4096))
    return made


@pytest.fixture
def child(files):
    argv = [sys.executable, "-c", CHILD, *(str(files[index]) for index in (0, 1, 3))]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mapped\n"
    yield process
    process.kill()
    process.communicate()


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.process
def test_what_a_child_has_mapped_is_ours_and_goes_with_us(tmp_path, child):
    memory = ChildMemory(tmp_path)
    assert memory.note() == ["psm_1a2b", "sem.mp-x_9"]
    child.kill()
    child.wait()
    memory.close()
    assert names(tmp_path) == {"psm_ffff", "other"}
    memory.close()


@pytest.mark.process
def test_a_child_that_has_cleaned_up_leaves_nothing_to_do(tmp_path, child, files):
    memory = ChildMemory(tmp_path)
    memory.note()
    files[0].unlink()
    files[0].write_bytes(b"another's, under a name that was given again")
    memory.close()
    assert names(tmp_path) == {"psm_1a2b", "psm_ffff", "other"}


@pytest.mark.process
def test_after_a_kill_the_next_start_removes_it(tmp_path, files):
    code = (
        "import os, pathlib, sys\n"
        "from slipstream.rollout.engines.vllm.vllm_memory import ChildMemory\n"
        "memory = ChildMemory(pathlib.Path(sys.argv[1]))\n"
        "memory._lock.note(['psm_1a2b', 'absent'])\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120).returncode == -9
    assert len(names(tmp_path)) == 5
    alive = ChildMemory(tmp_path)
    assert names(tmp_path) == {"sem.mp-x_9", "psm_ffff", "other", alive._path.name}
    assert segments.sweep(tmp_path) == []  # it lives
    alive.close()


def test_a_process_that_is_gone_has_mapped_nothing(tmp_path):
    assert mapped(2**22 + 1, tmp_path) == set()
    assert mapped(os.getpid(), tmp_path) == set()


def test_containers_that_share_the_memory_and_not_their_process_ids_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    # each as a process of its own would load it
    made = [runpy.run_path(vllm_memory.__file__)["ChildMemory"](tmp_path) for _ in range(2)]
    assert len(names(tmp_path)) == 2
    for memory in made:
        memory.close()
