"""CPU of each process of a stack in which nothing happens: every group is on its way, and the learner waits.

    python -m benchmarks.idle [--quick]

The simulated engine takes an hour for its first token, and has more free places than the run has tickets, so that
each role does only what it does while it waits. CPU time is the kernel's count and hardly minds a busy machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.result import tell

START_SECONDS, SETTLE_SECONDS = 300.0, 10.0
OVERRIDES = [
    "run.name=idle",
    "batch.groups=2",
    "batch.group_size=4",
    "data.limit=400",
    "evaluation.at_start=false",
    "rollout.engine.kind=simulated",
    "rollout.engine.max_sequences=256",
    "rollout.engine.options.vocab_size=16",
    "rollout.engine.options.step_seconds=3600",
    "rollout.ticket_seconds=3600",
    "learner.take_timeout_seconds=3600",
]
AIMS = {"busiest_percent": "< 2"}


def cpu_of(supervisor: psutil.Process) -> dict[str, float]:
    """CPU seconds of each process by its role."""
    found: dict[str, float] = {}
    for process in [supervisor, *supervisor.children(recursive=True)]:
        try:
            words, times = process.cmdline(), process.cpu_times()
        except psutil.Error:
            continue
        name = words[words.index("--name") + 1] if "--name" in words else Path(words[0]).name if words else "?"
        name = "up" if process.pid == supervisor.pid else name
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def wait_until_it_waits(stack: subprocess.Popen[bytes], log: Path) -> None:
    """Until the learner says what it waits for."""
    end = time.monotonic() + START_SECONDS
    while "waiting for step" not in log.read_text():
        if stack.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the stack did not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)
    time.sleep(SETTLE_SECONDS)


def measure(seconds: float) -> dict[str, float]:
    """Per cent of a core that each process takes."""
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        log = Path(folder) / "up.log"
        argv = [
            sys.executable,
            "-m",
            "slipstream.cli.main",
            "up",
            "tiny-sorter",
            *OVERRIDES,
            f"run.root={folder}",
        ]
        with log.open("wb") as out:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            stack = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            wait_until_it_waits(stack, log)
            supervisor = psutil.Process(stack.pid)
            before, begun = cpu_of(supervisor), time.monotonic()
            time.sleep(seconds)
            after, wall = cpu_of(supervisor), time.monotonic() - begun
        finally:
            stack.send_signal(signal.SIGTERM)
            try:
                stack.wait(60)
            except subprocess.TimeoutExpired:
                stack.kill()
                stack.wait()
    return {name: 100 * (after[name] - before[name]) / wall for name in after if name in before}


def main() -> None:
    """Measure, print a table and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 s instead of 60")
    found = measure(20.0 if parser.parse_args().quick else 60.0)
    for name, percent in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"{name:16} {percent:6.2f} %")
    figures = {name: round(percent, 2) for name, percent in found.items()}
    figures["busiest_percent"] = max(figures.values())
    tell("idle", figures, AIMS)


if __name__ == "__main__":
    main()
