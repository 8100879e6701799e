"""`python -m benchmarks.chaos [--seed N] [--faults 300] [--policy token]`: the proof that nothing is lost or twice.

A run of two epochs goes on while every kind of process is killed, stopped, asked to end, cut off and stalled at
random instants; at its end the books must balance. The seed decides the schedule.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.checks import problems
from benchmarks.chaos.runner import Runner
from benchmarks.chaos.schedule import make_schedule
from benchmarks.chaos.stack import Stack
from slipstream.run_folder import read_lines

POLICIES = ("token", "wait", "drop")


@dataclass(frozen=True)
class Trial:
    """One run: `prompts` an epoch must last as long as the faults do."""

    seed: int
    faults: int
    policy: str
    prompts: int
    gap: float = 1.0
    longest: float = 3.0
    eta: int = 2
    verbose: bool = True


def run(trial: Trial, root: Path, name: str) -> dict[str, object]:
    """Carry out a trial; returns its figures, with everything that was wrong under `problems`.

    Raises:
        ChaosError: The stack did not come back, or ended otherwise than by itself.
    """
    schedule = make_schedule(trial.seed, trial.faults, trial.gap, trial.longest)
    started = time.monotonic()
    stack = Stack(root, name, trial.prompts, trial.policy, f"staleness.max_staleness={trial.eta}")
    try:
        runner = Runner(stack, trial.verbose)
        runner.until_steps(1, 300.0)
        runner.inject(schedule)
        hurt = time.monotonic() - started
        stack.hurry()
        code = runner.wait(300.0)
        runner.until_gone(60.0)
        found = problems(stack, trial.policy, trial.eta)
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
    """Run one trial for each policy, or for the one asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; drawn when not given")
    parser.add_argument("--faults", type=int, default=300, help="faults in all, shared among the policies")
    parser.add_argument("--policy", choices=POLICIES, default=None, help="one policy only")
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between two faults")
    parser.add_argument("--prompts", type=int, default=None, help="prompts an epoch")
    parser.add_argument("--root", type=Path, default=None, help="folder for the runs; kept")
    parser.add_argument("--quick", action="store_true", help="30 faults")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    policies = [options.policy] if options.policy else list(POLICIES)
    each = (30 if options.quick else options.faults) // len(policies)
    prompts = options.prompts or round(3.5 * each * (options.gap + 1.5))
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        root = options.root or Path(place)
        root.mkdir(parents=True, exist_ok=True)
        results = []
        for number, policy in enumerate(policies):
            trial = Trial(seed + number, each, policy, prompts, options.gap)
            results.append(run(trial, root, f"chaos-{policy}-{seed % 10000}-{time.time_ns() % 10**6}"))
            print(json.dumps(results[-1]), flush=True)
    found = [text for result in results for text in result["problems"]]  # type: ignore[attr-defined]
    for text in found:
        print(f"problem: {text}", file=sys.stderr)
    print(
        json.dumps(
            {"seed": seed, "faults": sum(int(str(r["faults"])) for r in results), "problems": len(found)}
        )
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
