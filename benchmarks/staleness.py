"""What each staleness policy costs, with the real ledger, queues, buffer and rollout service in simulated time.

    python -m benchmarks.staleness [--quick] [--sigma S ...] [--eta N ...] [--way W ...] [--steps N] [--out FILE]

64 slots in 4 replicas, steps of 64 groups of one sample, log-normal lengths cut at 8 x the mean, a step as long as
decoding a batch. Ways: `token` and `pace` (one run: pace trains what token masks), `drop`, `wait`, and `lane`, which
is token with an express lane. Columns: share of the throughput limit; groups with tokens over the bound, to which
`pace` gives weight; the tokens, which `token` masks; mean length of what was trained over that of what was admitted;
groups dropped and handed over; CPU time; tokens over the bound in each tenth of the groups by length.

`--quick` runs sigma = 1 with eta 2 and 4, without `wait`, in 26 steps. These are no steady state yet: hold its
figures against the plain queue's on the same lengths, and those of 160 steps against the design's table. What is real
and what is simulated stands in staleness_stack.py. The last line is JSON; `--out` gets each run as a line.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from benchmarks.result import tell
from benchmarks.staleness_costs import Costs
from benchmarks.staleness_plain import Plain
from benchmarks.staleness_stack import Case, Stack, stack_of
from benchmarks.virtual import VirtualLoop, run
from slipstream.ledger.client import Ledger
from slipstream.ledger.server import embedded_server
from slipstream.protocol.messages import Group

# eta: share of the limit, groups over, tokens masked, of the longest decile; drop: share, trained length (design)
EXPECTED = {
    1: (0.72, 0.16, 0.33, 0.69, 0.66, 0.65),
    2: (0.98, 0.16, 0.24, 0.58, 0.88, 0.65),
    4: (0.997, 0.04, 0.07, 0.18, 0.97, 0.83),
    8: (0.997, 0.005, 0.003, 0.01, 0.997, 0.96),
}
AIMS = {
    "sigma1.0_eta4_lane_share": ">= 0.97",
    "sigma1.0_eta4_lane_masked": "<= 0.035",
    "sigma1.0_eta4_lane_length": ">= 0.98",
    **{
        f"sigma1.0_eta{eta}_{way}_points_from_{what}": "<= 3"
        for eta in (2, 4)
        for way in ("token", "drop")
        for what in ("plain_queue", "design")
    },
}
LANE: dict[str, Any] = {"floor": 0.2, "order": "oldest_first", "express": 1, "express_sequences": 10}
WAYS: dict[str, dict[str, Any]] = {
    "token": {"policy": "token"},
    "drop": {"policy": "drop"},
    "wait": {"policy": "wait"},
    "lane": {"policy": "token", **LANE},
}


def old_tokens(group: Group, version: int, eta: int) -> int:
    """Tokens of a group that are over the bound at a version."""
    return sum(count for sample in group.samples for stamp, count in sample.versions if version - stamp > eta)


async def measure(case: Case, url: str, loop: VirtualLoop) -> Costs:
    """Run a case and take its costs from the batches that the learner gets."""
    costs, started, name = Costs(case), time.process_time(), f"s{time.time_ns()}"

    async def watch(stack: Stack) -> None:
        async for version, batch in stack.batches():
            rows = [(each.ticket, each.token_count, old_tokens(each, version, case.eta)) for each, _ in batch]
            costs.step(version, loop.now, rows)
            costs.handed_over += sum(group.attempt > 0 for group, _ in batch)

    with tempfile.TemporaryDirectory() as folder:
        async with stack_of(case, url, name, Path(folder), loop) as stack:
            await stack.life.run(watch(stack))  # a part that dies ends the run with its cause
            audit = await stack.ledger.audit()
    assert audit.holds, audit.problems
    costs.dropped = audit.counts.groups["dropped"]
    costs.cpu = time.process_time() - started
    return costs


def table(way: str, sigma: float, cases: list[Case], url: str, out: Path | None) -> dict[str, float]:
    """Run a way's cases and print a row for each; returns their figures."""
    title = f"sigma {sigma}, {'token and pace' if way == 'token' else way}"
    heads = "eta   share    over  masked  length  dropped  handed      CPU  masked by decile, shortest first, %"
    print(f"\n{title}\n{heads}", flush=True)
    figures: dict[str, float] = {}
    for case in cases:
        costs = run(lambda loop, case=case: measure(case, url, loop))  # type: ignore[misc]
        print(costs.line(), flush=True)
        if out is not None:
            with out.open("a") as file:
                print(json.dumps({"way": way, **costs.record()}), file=file)
        key = f"sigma{sigma}_eta{case.eta}_{way}"
        figures[f"{key}_share"] = round(costs.share, 4)
        figures[f"{key}_masked"] = round(costs.masked_share, 4)
        figures[f"{key}_length"] = round(costs.bias, 4)
        figures |= {f"{key}_{name}": gap for name, gap in gaps(way, costs).items()}
    return figures


def gaps(way: str, costs: Costs) -> dict[str, float]:
    """Largest distances, in points: from the plain queue on the same lengths, and from the design's table."""
    if way not in ("token", "drop"):
        return {}
    names = ["share", "over", "masked", "longest"] if way == "token" else ["share", "length"]
    found = {"points_from_plain_queue": _most(_columns(costs), _columns(Plain(costs.case).run()), names)}
    if costs.case.sigma == 1.0 and costs.case.eta in EXPECTED:
        row = EXPECTED[costs.case.eta]
        expected = dict(zip(names, row[:4] if way == "token" else row[4:], strict=True))
        found["points_from_design"] = _most(_columns(costs), expected, names)
    return found


def _columns(costs: Costs) -> dict[str, float]:
    return {
        "share": costs.share,
        "over": costs.over,
        "masked": costs.masked_share,
        "longest": costs.deciles[-1],
        "length": costs.bias,
    }


def _most(found: dict[str, float], expected: dict[str, float], names: list[str]) -> float:
    return round(100 * max(abs(found[name] - expected[name]) for name in names), 2)


@contextmanager
def server() -> Iterator[str]:
    """A Valkey server of our own; its address once it answers."""
    with tempfile.TemporaryDirectory() as folder:
        how = embedded_server(Path(folder))
        process = Popen([*how.command, "--appendonly", "no"], stdout=DEVNULL, preexec_fn=_end_with_parent)
        try:
            asyncio.run(_answers(how.url))
            yield how.url
        finally:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG; Linux


async def _answers(url: str) -> None:
    async with await Ledger.connect(url, "ready", deadline=60):
        pass


def main() -> None:
    """Run the policies and print their costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sigma 1, eta 2 and 4, fewer steps, no `wait`")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--eta", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--out", type=Path, help="file that each run is added to as a JSON line")
    options = parser.parse_args()
    sigmas, etas, ways, steps = options.sigma, options.eta, options.way, options.steps
    if options.quick:
        sigmas, etas, ways, steps = [1.0], [2, 4], ["token", "drop", "lane"], min(steps, 26)
    figures: dict[str, float] = {}
    with server() as url:
        for sigma in sigmas:
            base = [Case(eta=eta, sigma=sigma, steps=steps, seed=options.seed) for eta in etas]
            for way in ways:
                cases = [replace(case, **WAYS[way]) for case in base]
                figures |= table(way, sigma, cases, url, options.out)
    tell("staleness", figures, {name: aim for name, aim in AIMS.items() if name in figures})


if __name__ == "__main__":
    main()
