"""Ours against TRL's GRPOTrainer on one CPU: the same model, prompts in the same order, batch, rate and seed.

    python -m benchmarks.vs_trl [--quick] [--seeds 0 1] [--steps 40]

TRL runs in an environment of its own, made under the cache folder on the first call; both use both cores, in
turns. Times count from the first step's start. The table also says where the gain comes from, so that no one
takes it for the effect of asynchrony alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.result import tell
from slipstream.config.load import load_config
from slipstream.models.cache import cache_root
from slipstream.models.resolve import resolve
from slipstream.prompts.build import build_prompts
from slipstream.prompts.order import EpochOrder
from slipstream.run.folder import read_lines
from slipstream.run.tokens import load_tokenizer

TRL, TORCH = "trl==1.16.0", "torch==2.13.0"
HERE = Path(__file__).resolve().parent
WINDOW, TARGET = 10, 0.6
# TRL's ratio is to the step's own start, so its clip never acts; recipe tis has none.
OURS = ["objective.recipe=tis", "learner.optimizer.schedule=constant", "batch.groups=4",
        "learner.checkpoint.every=100000",
        "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0", "evaluation.sets={}",
        "telemetry.log_format=json"]  # fmt: skip
AIMS = {"wall_to_target_ratio": ">= 2.5"}


def main() -> None:
    """Run both in turns and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    python = trl_python()
    seeds = options.seeds[:1] if options.quick else options.seeds
    pairs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="slipstream-vs-trl-") as scratch:
            trl = run_trl(python, Path(scratch), seed, options.steps)
            ours, split = run_ours(Path(scratch), seed, options.steps)
        pairs.append((trl, ours, split))
        print_pair(seed, trl, ours, split)
    tell("vs_trl", figures(pairs), AIMS)


def trl_python() -> Path:
    """Interpreter of TRL's environment, made when it is missing."""
    folder = cache_root() / "environments" / "trl-1.16.0"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", TORCH, TRL], check=True)
        (folder / ".complete").touch()
    return python


def run_trl(python: Path, scratch: Path, seed: int, steps: int) -> dict[str, Any]:
    """TRL's run on our prompts in our order."""
    config, _ = load_config("smollm2-sums", [*OURS, f"run.seed={seed}"])
    model = resolve(config.model.source)
    prompts, _ = build_prompts(config, load_tokenizer(str(model)), model)
    order = EpochOrder(len(prompts), seed)
    chosen = [prompts[order.at(number)[1]] for number in range(steps * config.batch.groups)]
    job = {
        "model": str(model), "scratch": str(scratch / "trl"), "seed": seed, "steps": steps, "threads": os.cpu_count(),
        "groups": config.batch.groups, "group_size": config.batch.group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "learning_rate": config.learner.optimizer.learning_rate,
        "warmup_steps": config.learner.optimizer.warmup_steps,
        "rows": [{"prompt": prompt.text, "answer": str(prompt.columns["answer"])} for prompt in chosen],
    }  # fmt: skip
    (scratch / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(HERE / "trl_job.py"), str(scratch / "job.json"), str(scratch / "trl.json")]
    with (scratch / "trl.log").open("wb") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    if code:
        sys.exit((scratch / "trl.log").read_text()[-2000:])
    rows = json.loads((scratch / "trl.json").read_text())
    return outcome([row["reward"] for row in rows], [row["wall"] for row in rows], [row["cpu"] for row in rows])


def run_ours(scratch: Path, seed: int, steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Our run; CPU seconds are those of all its processes, its start included, spread evenly over the steps."""
    command = [sys.executable, "-m", "slipstream.cli.main", "up", "smollm2-sums", *OURS,
               f"run.root={scratch}", "run.name=ours", f"run.seed={seed}", f"run.steps={steps}"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (scratch / "ours.log").open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    if code:
        sys.exit((scratch / "ours.log").read_text()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = read_lines(scratch / "ours" / "steps.jsonl")
    start = records[0]["time"] - records[0]["seconds"]
    walls = [record["time"] - start for record in records]
    cpus = [cpu * wall / walls[-1] for wall in walls]
    return outcome([record["reward"] for record in records], walls, cpus), decomposition(
        records, cpu, walls[-1]
    )


def outcome(rewards: list[float], walls: list[float], cpus: list[float]) -> dict[str, Any]:
    """Times to the target (the last window's mean reward) and to the end; a target missed is None."""
    reached = next(
        (i for i in range(WINDOW - 1, len(rewards)) if sum(rewards[i - WINDOW + 1 : i + 1]) / WINDOW >= TARGET),
        None,
    )
    return {
        "target_step": None if reached is None else reached + 1,
        "target_wall": None if reached is None else walls[reached],
        "target_cpu": None if reached is None else cpus[reached],
        "wall": walls[-1],
        "cpu": cpus[-1],
        "last_reward": sum(rewards[-WINDOW:]) / WINDOW,
    }


def decomposition(records: list[dict[str, Any]], cpu: float, wall: float) -> dict[str, float]:
    """What a step consists of, in seconds or shares."""
    groups = sum(record["groups"] for record in records)
    return {
        "skipped_groups_share": sum(record["skipped_groups"] for record in records) / groups,
        "train_cpu_s_per_step": _per_step(records, "cpu", ("build", "forward", "backward")),
        "optimizer_cpu_s_per_step": _per_step(records, "cpu", ("optimizer",)),
        "publish_s_per_step": _per_step(records, "parts", ("publish",)),
        "wait_s_per_step": _per_step(records, "parts", ("wait",)),
        "cores_busy": cpu / wall,
    }


def _per_step(records: list[dict[str, Any]], field: str, names: tuple[str, ...]) -> float:
    return sum(record[field].get(name, 0.0) for record in records for name in names) / len(records)


def print_pair(seed: int, trl: dict[str, Any], ours: dict[str, Any], split: dict[str, float]) -> None:
    """The comparison of one seed."""
    print(f"\nseed {seed}{'':>22}{'TRL':>10}{'slipstream':>12}{'ratio':>8}")
    for name, label in [("target_wall", f"wall s to reward {TARGET}"), ("target_cpu", "CPU s to it"),
                        ("wall", "wall s, all steps"), ("cpu", "CPU s, all steps")]:  # fmt: skip
        print(
            f"  {label:<26}{_show(trl[name]):>10}{_show(ours[name]):>12}{_show(_ratio(trl[name], ours[name])):>8}"
        )
    print(f"  {'last 10 steps reward':<26}{trl['last_reward']:>10.3f}{ours['last_reward']:>12.3f}")
    for name, value in split.items():
        print(f"  ours: {name:<28}{value:>14.2f}")


def figures(pairs: list[tuple[dict[str, Any], dict[str, Any], dict[str, float]]]) -> dict[str, Any]:
    """Medians over the seeds."""
    ratios = {
        "wall_to_target_ratio": [_ratio(trl["target_wall"], ours["target_wall"]) for trl, ours, _ in pairs],
        "wall_40_steps_ratio": [_ratio(trl["wall"], ours["wall"]) for trl, ours, _ in pairs],
        "cpu_40_steps_ratio": [_ratio(trl["cpu"], ours["cpu"]) for trl, ours, _ in pairs],
    }
    known = {name: [value for value in values if value is not None] for name, values in ratios.items()}
    result: dict[str, Any] = {
        name: round(statistics.median(values), 3) for name, values in known.items() if values
    }
    splits = [split for _, _, split in pairs]
    result |= {name: round(statistics.median(split[name] for split in splits), 3) for name in splits[0]}
    return result


def _ratio(trl: float | None, ours: float | None) -> float | None:
    return None if trl is None or ours is None else trl / ours


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
