"""Weights from a learner to its receivers: every link of ours beside the usual ways, with the same bytes, in one run.

    python -m benchmarks.weights [--quick] [--ray-python PYTHON] [--ucx-python PYTHON]

512 MiB (`--quick`: 64) of float32 in tensors of 4 MiB go from this process to one and to three others. Ours ends when
every receiver has the version and has compared each digest; no other way here compares anything. `sockets` are plain
TCP streams into warm memory, `gloo` a broadcast in 16 pieces at once (its fastest form), `ray` its object store (put
once, got by actors), `safetensors` a file that is written and read back. GB/s counts delivered bytes; CPU seconds are
those of all processes. `stall` is what the learner waits for, `published` ends when receivers may fetch; both are
multiples of one flat memcpy between warm buffers, made just before each round so that other load meets both alike.
`tcp+key` is tcp in a run with a key, which encrypts. Figures are medians; tcp and ucx over gloo compare from
published to verified, since gloo has no copy of its own. Like the learner under `slipstream up`, this process copies
past the cache, the memcpy too.

Rows whose parts are not installed here run with another interpreter (`--ray-python`, `--ucx-python`, or
SLIPSTREAM_RAY_PYTHON, SLIPSTREAM_UCX_PYTHON), or say why they do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.result import tell
from benchmarks.weights_peers import gloo, safetensors, sockets
from slipstream.supervisor.process_plan import STREAM_FROM
from slipstream.weights.bench import BenchRow, Paired, measure, paired_of, row, timed

RECEIVERS = (1, 3)
ROOT = Path(__file__).parent.parent
AIMS = {
    "shm_published_of_memcpy": ">= 0.6",
    "learner_stall_of_memcpy": "<= 1.3",
    "shm_x3_over_gloo_x3": ">= 3",
    "tcp_x1_over_gloo_x1": ">= 1",
    "tcp_x3_over_gloo_x3": ">= 1",
    "ucx_x1_over_gloo_x1": ">= 1",
    "ucx_x3_over_gloo_x3": ">= 1",
}


@dataclass
class Table:
    """Rows as they come, and the rounds behind them."""

    gigabytes: float
    rounds: dict[str, Paired] = field(default_factory=dict)
    rows: dict[str, BenchRow] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, method: str, receivers: int, rounds: Paired) -> None:
        found = row(method, receivers, self.gigabytes, rounds)
        self.rounds[f"{method}_x{receivers}"], self.rows[f"{method}_x{receivers}"] = rounds, found
        print(
            f"{method:12} {receivers:9} {found.milliseconds:8.1f} {found.gb_per_s:7.2f} {found.cpu_s_per_gb:9.3f} "
            f"{found.stall_of_memcpy:7.2f} {found.published_of_memcpy:10.2f}",
            flush=True,
        )

    def miss(self, method: str, why: str) -> None:
        self.missing[method] = why
        print(f"{method:12} not measured: {why}", flush=True)

    def over(self, ours: str, theirs: str) -> float | None:
        """How many times as fast; each is set against the memcpy beside it first.

        Of our links between hosts the way from published to verified counts: the learner's part is the stall.
        """
        if ours not in self.rounds or theirs not in self.rounds:
            return None

        def cost(name: str) -> float:
            link = name.startswith(("tcp", "ucx"))
            return statistics.median(
                (each.verified - each.published * link) / memcpy for memcpy, each in self.rounds[name]
            )

        return round(cost(theirs) / cost(ours), 3)


def here(table: Table, method: str, run: Callable[[int], Paired]) -> None:
    """A way that this interpreter can go."""
    for receivers in RECEIVERS:
        table.add(method, receivers, run(receivers))


def elsewhere(table: Table, method: str, argv: list[str], timeout: float = 600) -> None:
    """A way that needs another interpreter, which prints its rounds as JSON."""
    paths = [str(ROOT), str(ROOT / "common"), str(ROOT / "services")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        table.miss(method, f"{argv[0]}: {error}")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        table.miss(method, f"{argv[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return
    for receivers, rounds in json.loads(lines[-1]).items():
        table.add(method, int(receivers), paired_of(rounds))


def ours(table: Table, data: np.ndarray, repeats: int, ucx_python: str) -> None:
    """Our links."""
    for link in ("shm", "tcp", "tcp+key"):
        here(table, link, lambda receivers, link=link: measure(link, receivers, data, repeats))  # type: ignore[misc]
    if importlib.util.find_spec("ucxx") is not None:
        here(table, "ucx", lambda receivers: measure("ucx", receivers, data, repeats))
    elif ucx_python:
        argv = [ucx_python, "-m", "benchmarks.weights_ucx", str(data.nbytes >> 20), str(repeats)]
        elsewhere(table, "ucx", argv)
    else:
        table.miss("ucx", "UCXX is not installed here, and no --ucx-python is given")


def theirs(table: Table, data: np.ndarray, repeats: int, ray_python: str) -> None:
    """The usual ways."""
    here(table, "sockets", lambda receivers: sockets(data, receivers, repeats))
    if importlib.util.find_spec("torch") is not None:
        here(table, "gloo", lambda receivers: gloo(data, receivers, repeats))
    else:
        table.miss("gloo", "torch is not installed here")
    if importlib.util.find_spec("safetensors") is not None:
        here(table, "safetensors", lambda receivers: safetensors(data, receivers, repeats))
    else:
        table.miss("safetensors", "it is not installed here")
    if importlib.util.find_spec("ray") is not None:
        ray_python = ray_python or sys.executable
    if ray_python:
        argv = [ray_python, str(ROOT / "benchmarks" / "weights_ray.py"), str(data.nbytes >> 20), str(repeats)]
        elsewhere(table, "ray", argv)
    else:
        table.miss("ray", "it is not installed here, and no --ray-python is given")


def figures(table: Table) -> dict[str, object]:
    """What the aims are about, and every row."""
    rows = {
        f"{name}_{what}": round(value, 3)
        for name, each in table.rows.items()
        for what, value in (
            ("gb_per_s", each.gb_per_s),
            ("cpu_s_per_gb", each.cpu_s_per_gb),
            ("stall_of_memcpy", each.stall_of_memcpy),
        )
    }
    shm = table.rows["shm_x3"]
    ratios = {name: table.over(*name.split("_over_")) for name in AIMS if "_over_" in name}
    return {
        "gigabytes": round(table.gigabytes, 3),
        "shm_published_of_memcpy": round(1 / shm.published_of_memcpy, 3),
        "learner_stall_of_memcpy": round(shm.stall_of_memcpy, 3),
        **ratios,
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, 3 rounds")
    parser.add_argument("--repeats", type=int, help="rounds of each row (5)")
    parser.add_argument("--ray-python", default=os.environ.get("SLIPSTREAM_RAY_PYTHON", ""))
    parser.add_argument("--ucx-python", default=os.environ.get("SLIPSTREAM_UCX_PYTHON", ""))
    options = parser.parse_args()
    name = STREAM_FROM.partition("=")[0]
    if name not in os.environ.get("GLIBC_TUNABLES", ""):  # read by the C library when a process begins
        os.environ["GLIBC_TUNABLES"] = STREAM_FROM
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.weights", *sys.argv[1:]])
    repeats = options.repeats or (3 if options.quick else 5)
    data = np.random.default_rng(0).random(((64 if options.quick else 512) << 8, 1024), np.float32)
    table = Table(data.nbytes / 1e9)
    warm = np.ones_like(data)
    memcpy = statistics.median(timed(lambda: np.copyto(warm, data)) for _ in range(repeats + 2))
    print(
        f"{table.gigabytes:.3f} GB; one flat memcpy takes {memcpy * 1e3:.1f} ms ({table.gigabytes / memcpy:.2f} GB/s)"
    )
    print(f"{'way':12} {'receivers':>9} {'ms':>8} {'GB/s':>7} {'CPU s/GB':>9} {'stall':>7} {'published':>10}")
    ours(table, data, repeats, options.ucx_python)
    theirs(table, data, repeats, options.ray_python)
    tell("weights", figures(table), AIMS, not_measured=table.missing)


if __name__ == "__main__":
    main()
