"""Groups through rollout → reward → buffer → learner with the compute removed, and the same payload through Ray.

    python -m benchmarks.plumbing [--quick] [--without-ray]

A group is 8 samples × 1,024 tokens (64 KiB of ids and logprobs). Ours are the real services in processes of their own
over the real ledger: durable (fsync in the buffer and in the ledger before anything is acknowledged), the same with
CURVE on every socket, and not durable. Ray runs in an environment of its own, made under the cache folder on the
first call; its actors sit in the same places, but nothing there is durable, acknowledged or accounted for. CPU
seconds are those of all processes of a way; they and not the wall time are what a busy machine leaves comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.result import tell
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Member, RunTerms
from slipstream.ledger.server import embedded_server
from slipstream.models.cache import cache_root
from slipstream.transport.zeromq import keys

RAY = "ray==2.60.0"
BATCH, OPEN = 64, 320  # the default bound of 4 versions: five batches are open
MEBIBYTES = 8 * 1024 * 8 / 2**20
AIMS = {
    "over_ray_groups_per_cpu_second": ">= 3",
    "not_durable_groups_per_cpu_second": ">= 2000",
    "not_durable_ms_per_group": "< 1",
}
WAYS: dict[str, dict[str, Any]] = {
    "durable": {"sync": True, "curve": False, "server": []},
    "durable, CURVE": {"sync": True, "curve": True, "server": []},
    "not durable": {"sync": False, "curve": False, "server": ["--appendonly", "no"]},
    "durable, one at a time": {"sync": True, "curve": False, "server": [], "at_once": 1, "batch": 1},
}


class Stack:
    """Valkey, reward and buffer, and the two made-up ends, as processes of their own."""

    def __init__(self, folder: Path, way: dict[str, Any]) -> None:
        self._folder, self._way = folder, way
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._closing = threading.Event()

    def start(self, seconds: float) -> None:
        """Start all; the ends find the others by the ledger."""
        url = self._valkey()
        config = self._config(url)
        role = [sys.executable, "-m", "slipstream.cli.main", "run"]
        self._run("buffer", [*role, "buffer", "--config", config])
        self._run("reward", [*role, "reward", "--config", config, "--name", "reward-0"])
        end = [sys.executable, "-m", "benchmarks.plumbing_parts"]
        self._run("learner", [*end, "learner", config, "--seconds", str(seconds)])
        self._run("rollout", [*end, "rollout", config, "--at-once", str(self._way.get("at_once", 64))])
        threading.Thread(target=self._watch, daemon=True).start()

    def line(self, name: str, event: str) -> dict[str, Any]:
        """The line in which a process tells of an event."""
        stream = self._processes[name].stdout
        assert stream is not None
        for text in stream:
            if text.startswith("{") and (said := json.loads(text)).get("event") == event:
                return dict(said)
        raise SystemExit(f"{name} ended without {event!r}; see {self._folder / name}.log")

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each process and of those below it."""
        found = {}
        for name, process in self._processes.items():
            whole = psutil.Process(process.pid)
            times = [each.cpu_times() for each in [whole, *whole.children(recursive=True)] if each.is_running()]
            found[name] = sum(each.user + each.system for each in times)
        return found

    def stop(self, name: str) -> None:
        """Ask one process to end."""
        self._processes[name].terminate()

    def _watch(self) -> None:
        """End all once one of them has failed: the others would wait for it, and `line` for them."""
        while not self._closing.wait(0.5):
            if any(process.poll() not in (None, 0, -signal.SIGTERM) for process in self._processes.values()):
                for process in self._processes.values():
                    process.kill()
                return

    def close(self) -> None:
        """End what is left."""
        self._closing.set()
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _valkey(self) -> str:
        how = embedded_server(self._folder / "redis")
        self._run("valkey", [*how.command, *self._way["server"]])
        return how.url

    def _config(self, url: str) -> str:
        tree: dict[str, Any] = {
            "run": {"name": "plumbing", "root": str(self._folder)},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "exact_match"}]},
            "batch": {"groups": self._way.get("batch", BATCH), "group_size": 8},
            "sampling": {"max_new_tokens": 1024},
            "staleness": {"policy": "pace", "max_staleness": 1000},
            "objective": {"recipe": "grpo"},
            "buffer": {"sync": self._way["sync"], "max_groups": OPEN},
            "network": {"credits": 64},
            "redis": {"url": url},
            "telemetry": {"log_format": "json", "log_level": "warning"},
        }
        if self._way["curve"]:
            tree["network"]["keys"] = str(keys.make(self._folder / "keys").parent)
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return str(path)

    def _run(self, name: str, argv: Sequence[str]) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("w") as log:
            self._processes[name] = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=Path(__file__).parents[1]
            )


@contextmanager
def stack(way: dict[str, Any]) -> Iterator[Stack]:
    """A stack in a folder of its own that goes with it."""
    with tempfile.TemporaryDirectory(prefix="plumbing-") as folder:
        made = Stack(Path(folder), way)
        try:
            yield made
        finally:
            made.close()


def through_ours(name: str, seconds: float) -> dict[str, float]:
    """One way through our services."""
    with stack(WAYS[name]) as made:
        made.start(seconds)
        made.line("learner", "begin")
        before = made.cpu()
        end = made.line("learner", "end")
        after = made.cpu()
        made.stop("rollout")
        latency = made.line("rollout", "latency")
    cpu = {each: after[each] - before[each] for each in after}
    print(
        f"  {name}: CPU ms a group: " + ", ".join(f"{k} {v / end['groups'] * 1e3:.2f}" for k, v in cpu.items())
    )
    return {
        **rates(end["groups"], end["seconds"], sum(cpu.values())),
        "p50_ms": latency["p50_ms"],
        "p99_ms": latency["p99_ms"],
    }


def through_ray(seconds: float) -> dict[str, dict[str, float]]:
    """Both ways through Ray."""
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        argv = [str(ray_python()), str(Path(__file__).parent / "plumbing_ray.py"), str(seconds), scratch]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) != 2:
        raise SystemExit(f"Ray failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {
        f"Ray, {each['way']}": rates(each["groups"], each["seconds"], each["cpu_seconds"]) for each in found
    }


def ray_python() -> Path:
    """Interpreter of Ray's environment, made when it is missing."""
    folder = cache_root() / "environments" / RAY.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-cache-dir", RAY, "numpy", "psutil"], check=True
        )
        (folder / ".complete").touch()
    return python


def rates(groups: float, seconds: float, cpu: float) -> dict[str, float]:
    """What a way reached."""
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": groups * MEBIBYTES / seconds,
        "groups_per_cpu_s": groups / cpu,
        "ms_per_group": cpu / groups * 1e3,
    }


async def transitions(url: str, seconds: float, process: psutil.Process) -> dict[str, float]:
    """Transitions a second of the ledger alone: admit, scored, buffered, take, commit; from one client."""
    async with await Ledger.connect(url, "transitions") as ledger:
        terms = RunTerms(
            run_id="t", dataset_fingerprint="d", prompts=10**6, seed=0, max_staleness=0, groups_per_step=64
        )
        await ledger.open_run(terms)
        await ledger.claim_learner("L")
        await ledger.join(Member(id="g", role="rollout", incarnation="a", ttl_s=3600))
        begun, step, groups, before = time.perf_counter(), 0, 0, process.cpu_times()
        while time.perf_counter() - begun < seconds:
            tickets = await ledger.admit("g", 64, step)
            held = [(each.number, each.attempt) for each in tickets]
            await asyncio.gather(*(ledger.scored(*each, "g", 8192) for each in held))
            await ledger.buffered_all([(*each, "g", "0", step, step, 8192, True, 65536) for each in held])
            await ledger.take(step + 1, held, "L")
            await ledger.commit(step + 1, step + 1, "L", held)
            step, groups = step + 1, groups + len(held)
            await ledger.durable(step, "L")
        wall, after = time.perf_counter() - begun, process.cpu_times()
    server = after.user + after.system - before.user - before.system
    return {"transitions_per_s": 5 * groups / wall, "server_us_per_transition": server / (5 * groups) * 1e6}


def ledger_alone(seconds: float) -> dict[str, float]:
    """The ledger's own pace, with every write on the disk."""
    with tempfile.TemporaryDirectory(prefix="plumbing-") as folder:
        how = embedded_server(Path(folder))
        server = subprocess.Popen(how.command, stdout=subprocess.DEVNULL)
        try:
            return asyncio.run(transitions(how.url, seconds, psutil.Process(server.pid)))
        finally:
            server.kill()
            server.wait()


def main() -> None:
    """Each way in turn, a table, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 s each instead of 15")
    parser.add_argument("--without-ray", action="store_true", help="ours alone")
    options = parser.parse_args()
    seconds = 3.0 if options.quick else 15.0
    ours = {name: through_ours(name, seconds) for name in WAYS}
    ray = {} if options.without_ray else through_ray(seconds)
    print(
        f"\n{'':24} {'groups/s':>9} {'MB/s':>7} {'groups/CPU s':>13} {'CPU ms':>7} {'p50 ms':>7} {'p99 ms':>7}"
    )
    for name, found in (ours | ray).items():
        late = f"{found['p50_ms']:7.1f} {found['p99_ms']:7.1f}" if "p50_ms" in found else ""
        print(
            f"{name:24} {found['groups_per_s']:9.0f} {found['mb_per_s']:7.1f} {found['groups_per_cpu_s']:13.0f} "
            f"{found['ms_per_group']:7.2f} {late}"
        )
    figures = {
        f"{way.replace(', ', '_').replace(' ', '_')}_{k}": v
        for way, row in (ours | ray).items()
        for k, v in row.items()
    }
    figures["not_durable_groups_per_cpu_second"] = ours["not durable"]["groups_per_cpu_s"]
    if ray:
        best = max(row["groups_per_cpu_s"] for row in ray.values())
        figures["over_ray_groups_per_cpu_second"] = ours["not durable"]["groups_per_cpu_s"] / best
        figures["durable_over_ray_groups_per_cpu_second"] = ours["durable"]["groups_per_cpu_s"] / best
    alone = ledger_alone(seconds)
    print(f"\nledger alone: {alone['transitions_per_s']:.0f} transitions/s, "
          f"{alone['server_us_per_transition']:.0f} µs of the server's CPU each")  # fmt: skip
    figures |= alone
    rounded = {name: round(value, 3) for name, value in figures.items()}
    tell("plumbing", rounded, AIMS)


if __name__ == "__main__":
    main()
