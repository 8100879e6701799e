"""`python -m benchmarks.chaos [--seed N] [--faults 300] [--way token]`: the proof that nothing is lost or twice.

A run of two epochs goes on while every kind of process is killed, stopped (also for longer than a lease), asked to
end, cut off and stalled at random instants, and while programs that attack, floods of strangers, members gone bad and
poisoned files come in by its doors; at its end the books must balance. Four runs share the faults: one for
each policy that bounds age, with a server of their own behind a proxy, and `embedded`, which is `token` with the
server that `up` starts itself as one more victim. The seed decides the schedule. Each fault is a line of progress;
the last line is JSON. About 15 minutes on a quiet machine; whatever is not over after `--minutes` is a problem.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.checks import problems
from benchmarks.chaos.runner import ChaosError, Runner
from benchmarks.chaos.schedule import MENU, Fault, Menu, embedded, longer, make_schedule
from benchmarks.chaos.stack import Stack
from benchmarks.result import tell
from slipstream.run.folder import read_lines

POLICIES = ("token", "wait", "drop")
WAYS = (*POLICIES, "embedded")
AIMS = {"problems": "== 0"}


@dataclass(frozen=True)
class Trial:
    """One run: `prompts` an epoch must last as long as the faults do.

    Attributes:
        freezes: Whether there are stops that outlast a lease.
        embedded: Whether the server is the one that `up` starts.
        deadline: Seconds for all of it.
        menu: What may happen.
        weights: How they travel: over tcp there is one more port that strangers find.
    """

    seed: int
    faults: int
    policy: str
    prompts: int
    gap: float = 1.0
    longest: float = 3.0
    eta: int = 2
    freezes: bool = False
    embedded: bool = False
    deadline: float = 1800.0
    menu: Menu = field(default_factory=lambda: MENU)
    weights: str = "auto"

    def schedule(self) -> list[Fault]:
        """The faults."""
        menu = embedded(self.menu) if self.embedded else self.menu
        return make_schedule(
            self.seed, self.faults, self.gap, self.longest, longer(menu) if self.freezes else menu
        )


def run(trial: Trial, root: Path, name: str) -> dict[str, Any]:
    """Carry out a trial; returns its figures, with everything that was wrong under `problems`.

    Raises:
        ChaosError: The stack did not come back, or ended otherwise than by itself.
    """
    started = time.monotonic()
    eta = f"staleness.max_staleness={trial.eta}"
    settings = (eta, f"weights.transport={trial.weights}")
    stack = Stack(root, name, trial.prompts, trial.policy, *settings, embedded=trial.embedded)
    try:
        runner = Runner(stack, trial.deadline)
        runner.until_steps(1, 300.0)
        runner.inject(trial.schedule())
        hurt = time.monotonic() - started
        stack.hurry()
        code = runner.wait(300.0 + trial.prompts)  # a step is two prompts, in half a second at the worst
        runner.until_gone(60.0)
        found = [*runner.acts.findings, *problems(stack, trial.policy, trial.eta)]
        if code:
            found.append(f"exit code {code}: {stack.text[-3000:]}")
        if "Traceback" in stack.text:
            found.append("a traceback: " + stack.text[stack.text.index("Traceback") :][:2000])
        lines = read_lines(stack.folder.steps)
        return {
            "seed": trial.seed,
            "policy": trial.policy,
            "faults": len(runner.done),
            "by_kind": dict(Counter(fault.kind for _, fault in runner.done)),
            "by_process": dict(Counter(fault.role for _, fault in runner.done)),
            "seconds_of_faults": round(hurt, 1),
            "seconds": round(time.monotonic() - started, 1),
            "steps": lines[-1]["step"],
            "steps_made_again": len(lines) - lines[-1]["step"],
            "problems": found,
        }
    finally:
        stack.close()


def main() -> int:
    """Run one trial for each way, or for the one asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; drawn when not given")
    parser.add_argument("--faults", type=int, default=300, help="faults in all, shared among the ways")
    parser.add_argument("--way", choices=WAYS, default=None, help="one way only")
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between two faults")
    parser.add_argument("--prompts", type=int, default=None, help="prompts an epoch")
    parser.add_argument("--root", type=Path, default=None, help="folder for the runs; kept")
    parser.add_argument("--minutes", type=float, default=45.0, help="limit for all of it")
    parser.add_argument("--quick", action="store_true", help="40 faults, none that outlasts a lease")
    options = parser.parse_args()
    logging.getLogger("slipstream").setLevel(logging.ERROR)  # what bad members hear is no news
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        root = options.root or Path(place)
        root.mkdir(parents=True, exist_ok=True)
        results = list(outcomes(trials(options, seed), root, options.minutes))
    found = [text for result in results for text in result["problems"]]
    for text in found:
        print(f"problem: {text}", file=sys.stderr)
    kinds = sum((Counter(result.get("by_kind", {})) for result in results), Counter[str]())
    figures = {"faults": sum(kinds.values()), "by_kind": dict(kinds), "problems": len(found)}
    tell("chaos", figures, AIMS, seed=seed)
    return 1 if found else 0


def trials(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, Trial]]:
    """What is to be run, by name; the faults are shared out to the last one."""
    ways = [options.way] if options.way else list(WAYS)
    total = 40 if options.quick else options.faults
    for number, way in enumerate(ways):
        each = total // len(ways) + (number < total % len(ways))
        # twice what is needed: when the faults are over, the rest goes fast
        prompts = options.prompts or round(5 * each * (options.gap + 1.5)) + 200
        yield (
            way,
            Trial(
                seed + number,
                each,
                "token" if way == "embedded" else way,
                prompts,
                options.gap,
                freezes=not options.quick,
                embedded=way == "embedded",
                weights="tcp" if way == "wait" else "auto",
            ),
        )


def outcomes(ways: Iterable[tuple[str, Trial]], root: Path, minutes: float) -> Iterator[dict[str, Any]]:
    """Figures of one trial after the other, each printed as it ends; one that breaks off is a problem of its own."""
    ends = time.monotonic() + 60 * minutes
    for way, trial in ways:
        print(f"{way}: {trial.faults} faults, seed {trial.seed}", flush=True)
        name = f"chaos-{way}-{trial.seed % 10000}-{time.time_ns() % 10**6}"
        try:
            result = run(replace(trial, deadline=max(1.0, ends - time.monotonic())), root, name)
        except ChaosError as error:
            result = {"seed": trial.seed, "policy": trial.policy, "problems": [f"{way}: {error}"]}
        print(json.dumps(result), flush=True)
        yield result


if __name__ == "__main__":
    sys.exit(main())
