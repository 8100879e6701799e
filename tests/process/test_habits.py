"""What people have around a run: other launchers' variables, files with the names of libraries, IPv6, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
REWARD = "import helper\n\ndef score(completion, task):\n    return helper.value(completion)\n"
HELPER = "def value(text):\n    return sum(place * ord(each) for place, each in enumerate(text, 1)) % 97 / 97\n"


def test_a_folder_with_files_called_like_libraries_and_ranks_of_another_launcher(simulated, tmp_path):
    for name in ("queue", "random", "types", "tokenizers", "logging", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')\n")
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text(HELPER)
    launcher = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    settings = [each for each in simulated if not each.startswith("reward.functions")]
    # as the console script has it: the working folder is not on the path
    command = [sys.executable, "-P", "-m", "slipstream.cli.main", "up", "tiny-sorter", *settings, "run.steps=2"]
    place = [f"run.root={tmp_path}/runs", "reward.functions=[{use: 'own:score'}]"]
    done = subprocess.run(
        [*command, *place],
        cwd=tmp_path,
        env={**os.environ, **launcher},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_whole_run_over_ipv6(stack, simulated):
    if not Path("/proc/net/if_inet6").read_text().strip():
        pytest.skip("this host has no IPv6 address")
    run = stack().up(*simulated, "run.steps=4", "network.host=::1", "weights.transport=tcp")
    assert run.wait() == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 8
    run.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_slurm_s_warning_are_a_stop_with_a_checkpoint(stack, simulated, number):
    run = stack().up(*simulated, "run.steps=100000", "learner.checkpoint.every=100000")
    run.until_step(2)
    assert run.process is not None
    psutil.Process(run.process.pid).send_signal(number)
    assert run.wait() == 0, run.text[-4000:]
    assert list((run.folder / "checkpoints").glob("step-*/COMPLETE"))
    run.assert_gone()


@pytest.mark.parametrize("how", [">&- 2>&-", "> /dev/full 2>/dev/full", "2>&1 | head -1", "2>/dev/null | true"])
def test_output_that_cannot_be_written_ends_no_run(simulated, tmp_path, how):
    command = [
        sys.executable,
        "-P",
        "-m",
        "slipstream.cli.main",
        "up",
        "tiny-sorter",
        *simulated,
        "run.steps=2",
    ]
    line = " ".join(f"'{each}'" for each in [*command, f"run.root={tmp_path}/runs", "run.name=r"])
    script = f"({line}; echo $? > code) {how}"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=300, check=False, capture_output=True)
    assert (tmp_path / "code").read_text().strip() == "0"
    assert len((tmp_path / "runs" / "r" / "steps.jsonl").read_text().splitlines()) == 2
