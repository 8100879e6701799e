"""What each staleness policy costs, with the real ledger, queues, buffer and rollout service in simulated time.

    python -m benchmarks.staleness [--quick] [--sigma S ...] [--eta N ...] [--steps N]

64 slots in 4 replicas, steps of 64 groups of one sample, log-normal lengths cut at 8 x the mean, a step as long as
decoding a batch. Columns: share of the throughput limit; groups with tokens over the bound, to which `pace` gives
weight; the tokens, which `token` masks; the same in the longest tenth of groups; mean length of what was trained over
that of what was admitted. `--quick` runs sigma = 1 with eta 2 and 4, without `wait` and the plainer lanes, in few
steps: it shows the shape, its figures scatter. What is real and what is simulated stands in staleness_stack.py. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from benchmarks.staleness_stack import BATCH, Case, stack_of
from benchmarks.virtual import VirtualLoop, run
from slipstream.ledger.client import Ledger
from slipstream.ledger.server import embedded_server
from slipstream.messages import Group

# eta: share of the limit, groups over, tokens masked, of the longest decile; drop: share, trained length (design)
EXPECTED = {
    1: (0.72, 0.16, 0.33, 0.69, 0.66, 0.65),
    2: (0.98, 0.16, 0.24, 0.58, 0.88, 0.65),
    4: (0.997, 0.04, 0.07, 0.18, 0.97, 0.83),
    8: (0.997, 0.005, 0.003, 0.01, 0.997, 0.96),
}
AIMS = {"share": 0.97, "masked": 0.035, "length": 0.02}
LANE: dict[str, Any] = {"floor": 0.2, "order": "oldest_first", "express": 1, "express_sequences": 10}


@dataclass
class Result:
    """What a run came to. Lengths and masked tokens are of each trained group after the warm-up."""

    case: Case
    share: float = 0.0
    lengths: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    bias: float = 1.0
    dropped: int = 0
    handed_over: int = 0
    wall: float = 0.0

    @property
    def over(self) -> float:
        """Share of trained groups with a token over the bound."""
        return sum(count > 0 for count in self.masked) / len(self.masked)

    @property
    def masked_share(self) -> float:
        """Share of tokens over the bound."""
        return sum(self.masked) / sum(self.lengths)

    @property
    def deciles(self) -> list[float]:
        """The same by length, shortest tenth first."""
        pairs = sorted(zip(self.lengths, self.masked, strict=True))
        cuts = [len(pairs) * tenth // 10 for tenth in range(11)]
        parts = [pairs[low:high] for low, high in itertools.pairwise(cuts)]
        return [sum(masked for _, masked in part) / sum(length for length, _ in part) for part in parts]

    def line(self) -> str:
        """One row of the table."""
        case, longest = self.case, self.deciles[-1]
        return (
            f"{case.eta:>3}  {self.share:6.1%}  {self.over:6.1%}  {self.masked_share:6.2%}  {longest:6.1%}"
            f"  {self.bias:6.3f}  {self.dropped:>7}  {self.handed_over:>6}  {self.wall:6.1f} s"
        )


def old_tokens(group: Group, version: int, eta: int) -> int:
    """Tokens of a group that are over the bound at a version."""
    return sum(count for sample in group.samples for stamp, count in sample.versions if version - stamp > eta)


def length_bias(case: Case, trained: dict[int, int]) -> float:
    """Mean length of what was trained over that of what was admitted, among tickets that are all accounted for."""
    # near the end long groups are still on their way: leave out what began within the longest group's time
    until = max(trained) - (case.eta + 9) * BATCH
    admitted = statistics.fmean(case.lengths(until))
    return statistics.fmean(tokens for ticket, tokens in trained.items() if ticket < until) / admitted


async def measure(case: Case, url: str, loop: VirtualLoop) -> Result:
    """Run a case and take its costs from the batches that the learner gets."""
    result, trained, warm = Result(case), {}, case.eta + 6
    started, begun, ended = time.perf_counter(), 0.0, 0.0
    name = f"s{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        async with stack_of(case, url, name, Path(folder), loop) as stack:
            async for version, batch in stack.batches():
                begun = loop.now if version == warm else begun
                ended = loop.now
                for group, _ in batch:
                    trained[group.ticket] = group.token_count
                    if version >= warm:
                        result.lengths.append(group.token_count)
                        result.masked.append(old_tokens(group, version, case.eta))
                        result.handed_over += group.attempt > 0
            audit = await stack.ledger.audit()
    assert audit.holds, audit.problems
    result.dropped = audit.counts.groups["dropped"]
    result.share = (case.steps - 1 - warm) * case.step_seconds() / (ended - begun)
    result.bias = length_bias(case, trained)
    result.wall = time.perf_counter() - started
    return result


def table(title: str, cases: Sequence[Case], url: str) -> list[Result]:
    """Run cases and print a row for each."""
    print(f"\n{title}\neta   share    over  masked  longest  length  dropped  handed  wall", flush=True)
    results = []
    for case in cases:
        results.append(run(lambda loop, case=case: measure(case, url, loop)))  # type: ignore[misc]
        print(results[-1].line(), flush=True)
    return results


def compare(results: dict[str, list[Result]]) -> dict[str, float]:
    """Largest distance from the design's table, in points of each column."""
    worst = 0.0
    for paced, dropped in zip(results["token"], results["drop"], strict=True):
        found = (paced.share, paced.over, paced.masked_share, paced.deciles[-1], dropped.share, dropped.bias)
        gaps = [abs(a - b) for a, b in zip(found, EXPECTED[paced.case.eta], strict=True)]
        print(f"eta {paced.case.eta}: points from the design's table {[round(100 * gap, 1) for gap in gaps]}")
        worst = max(worst, *gaps)
    return {"worst_gap_points": round(100 * worst, 2)}


@contextmanager
def server() -> Iterator[str]:
    """A Valkey server of our own; its address once it answers."""
    with tempfile.TemporaryDirectory() as folder:
        how = embedded_server(Path(folder))
        process = Popen([*how.command, "--appendonly", "no"], stdout=DEVNULL)
        try:
            asyncio.run(_answers(how.url))
            yield how.url
        finally:
            process.kill()
            process.wait()


async def _answers(url: str) -> None:
    async with await Ledger.connect(url, "ready", deadline=60):
        pass


def main() -> None:
    """Run the policies and print their costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sigma 1, eta 2 and 4, fewer steps")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--eta", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    sigmas, etas = ([1.0], [2, 4]) if options.quick else (options.sigma, options.eta)
    steps = min(options.steps, 26) if options.quick else options.steps
    figures: dict[str, float] = {}
    with server() as url:
        for sigma in sigmas:
            base = [Case(eta=eta, sigma=sigma, steps=steps) for eta in etas]
            figures |= costs(sigma, base, url, options.quick)
    print(json.dumps({"benchmark": "staleness", "figures": figures, "aims": AIMS}))


def costs(sigma: float, base: Sequence[Case], url: str, quick: bool) -> dict[str, float]:
    """All tables of one sigma."""
    results = {
        policy: table(f"sigma {sigma}, {note}", [replace(case, policy=policy) for case in base], url)
        for policy, note in [
            ("token", "pace and token (the same run: pace trains what token masks)"),
            ("drop", "drop"),
            ("wait", "wait"),
        ][: 2 if quick else 3]
    }
    figures = compare(results) if sigma == 1.0 else {}
    lanes: dict[str, dict[str, Any]] = {
        "lane": LANE,
        "plain": {"floor": LANE["floor"]},
        "window": {"floor": LANE["floor"], "window": 256},
        "lane_and_window": {"window": 256, **LANE},
    }
    for name, changes in list(lanes.items())[: 1 if quick else 4]:
        title = f"sigma {sigma}, token, {name}: {changes}"
        for result in table(title, [replace(case, **changes) for case in base], url):
            key = f"sigma{sigma}_eta{result.case.eta}_{name}"
            figures |= {
                f"{key}_share": round(result.share, 4),
                f"{key}_masked": round(result.masked_share, 4),
                f"{key}_length": round(result.bias, 4),
            }
    return figures


if __name__ == "__main__":
    main()
