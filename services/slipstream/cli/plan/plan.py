"""`plan`: what a config will come to, before it is run: speed, what limits it, ages, memory, and better settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.cli.plan.plan_memory import Sizes, learner_memory, replica_memory, version_bytes
from slipstream.cli.plan.plan_numbers import FLOOR, pipeline_of
from slipstream.cli.plan.simulation import Costs, Pipeline, simulate
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.errors import EXIT_OK
from slipstream.models.resolve import present

ABOUT = """Nothing is started. Numbers come from a run of the same kind (--from RUN), or are given: the mean length,
the tokens a second of a replica with all its sequences in use, and the seconds of the learner's step. A given
number goes before a measured one. The pipeline is then simulated with the config's sizes."""
STEPS, SEARCH_STEPS = 120, 50
MOST_GROUPS = 8192  # of a search's run, so that a plan of large batches takes seconds too
REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ETAS = (0, 1, 2, 3, 4, 6, 8)
WORTH = 0.95  # a setting that costs less than this much of the speed is as good as the dearer one


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options beside the config."""
    parser.add_argument(
        "--from", dest="run", metavar="RUN", help="take what is measured from this run's folder"
    )
    number = {"type": _positive, "metavar": "X"}
    parser.add_argument("--mean-length", **number, help="mean completion tokens, before the cut at the longest")
    parser.add_argument(
        "--sigma", **number | {"default": 1.0}, help="shape of their log-normal distribution; 1.0"
    )
    parser.add_argument("--tokens-per-second", **number, help="of one replica with all its sequences in use")
    what = "share of a decode step's time that does not depend on how many sequences are in it, 0 to 1; 0.5"
    parser.add_argument("--decode-floor", type=_share, metavar="X", default=FLOOR, help=what)
    parser.add_argument(
        "--step-seconds", **number, help="what the learner does with a batch, publishing included"
    )
    parser.add_argument("--score-seconds", **number, help="scoring a group")
    parser.add_argument("--bandwidth", **number, help="of the weights' link, MB/s")
    parser.add_argument(
        "--prompt-tokens", **number | {"default": 256}, help="longest prompt, for the cache; 256"
    )
    parser.add_argument("--json", action="store_true", help="everything, for scripts")


def _positive(text: str) -> float:
    return _number(text, 1e-12, 1e15, "a number above 0")


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def _number(text: str, least: float, most: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def plan(options: argparse.Namespace) -> int:
    """Print the prediction."""
    config, _ = load_config(options.config, options.overrides)
    model, unknown = _sizes(config)
    version = None if model is None else float(version_bytes(config, model))
    if model is None and options.bandwidth is not None:
        unknown += "; so --bandwidth is left out"
    pipeline, source = pipeline_of(config, options, version)
    costs = simulate(pipeline, STEPS)
    better, best = suggest(pipeline)
    found = {
        "source": source,
        "stages": pipeline.stages,
        "bottleneck": bottleneck(pipeline),
        "steps_per_hour": 3600 / costs.step_seconds,
        "tokens_per_second": tokens_of(pipeline) / costs.step_seconds,
        "costs": asdict(costs),
        "learner_bytes": None if model is None else learner_memory(config, model),
        "replica_bytes": None if model is None else replica_memory(config, model, int(options.prompt_tokens)),
        "memory_unknown": unknown,
        "suggested": {
            "rollout.replicas": better.replicas,
            "staleness.max_staleness": better.eta,
            "steps_per_hour": 3600 / best.step_seconds,
            "costs": asdict(best),
        },
    }
    print(json.dumps(found, indent=2) if options.json else "\n".join(_lines(options.config, found)))  # noqa: T201
    return EXIT_OK


def bottleneck(pipeline: Pipeline) -> str:
    """The stage that needs most time for a step."""
    return max(pipeline.stages, key=lambda name: pipeline.stages[name])


def tokens_of(pipeline: Pipeline) -> float:
    """Completion tokens of a step."""
    return pipeline.groups * pipeline.group_size * sum(pipeline.lengths) / len(pipeline.lengths)


def suggest(pipeline: Pipeline) -> tuple[Pipeline, Costs]:
    """The fewest replicas that come near the greatest speed, and then the smallest bound that does.

    Replicas are taken for hosts of their own; the learner's time stays as it is.
    """
    enough = [count for count in REPLICAS if count <= _most_replicas(pipeline)]
    chosen = _cheapest([replace(pipeline, replicas=count) for count in enough])
    return _cheapest([replace(chosen[0], eta=eta) for eta in ETAS])


def _most_replicas(pipeline: Pipeline) -> int:
    """Twice as many as generating as fast as training takes; more cannot help."""
    alone = replace(pipeline, replicas=1).stages["generate"]
    return max(pipeline.replicas, 1 + int(2 * alone / max(pipeline.step_seconds, 1e-9)))


def _cheapest(candidates: Sequence[Pipeline]) -> tuple[Pipeline, Costs]:
    """The first of the candidates that is nearly as fast as the fastest."""
    steps = max(24, min(SEARCH_STEPS, MOST_GROUPS // candidates[0].groups))
    tried = [(each, simulate(each, steps)) for each in candidates]
    fastest = max(_worth(costs) for _, costs in tried)
    return next((each, costs) for each, costs in tried if _worth(costs) >= WORTH * fastest)


def _worth(costs: Costs) -> float:
    """Steps a second, less the share of their tokens that had no weight."""
    return (1 - costs.masked) / costs.step_seconds


def _sizes(config: Config) -> tuple[Sizes | None, str]:
    """The model's sizes, where it lies on this machine in a form that tells them; else why not."""
    source = Path(config.model.source).expanduser()
    folder = source if source.is_dir() else present(config.model.source)
    if folder is None or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return None, "the model is not on this machine: `slipstream fetch` it, or give a folder"
    model = Sizes.of(folder)
    return model, "" if model else f"not foretold: {folder / 'config.json'} does not tell the model's sizes"


def _lines(config: str, found: dict[str, Any]) -> list[str]:
    costs, better = found["costs"], found["suggested"]
    stages = " · ".join(f"{name} {seconds:.2f} s" for name, seconds in found["stages"].items())
    return [
        f"plan of {config}, from {found['source']}",
        f"a step      {stages}; the limit is {found['bottleneck']}",
        f"predicted   {found['steps_per_hour']:,.0f} steps an hour ({costs['step_seconds']:.2f} s each), "
        f"{costs['share']:.0%} of the limit, {found['tokens_per_second']:,.0f} tokens/s, "
        f"the learner waits {costs['waited']:.0%} of the time",
        f"ages        {_ages(costs)}",
        *_memory(found),
        f"suggested   rollout.replicas={better['rollout.replicas']} "
        f"staleness.max_staleness={better['staleness.max_staleness']}: {better['steps_per_hour']:,.0f} steps an "
        f"hour, {better['costs']['share']:.0%} of the limit; ages {_ages(better['costs'])}",
        "            (each replica on cores of its own; the fewest, and the smallest bound, within 5 % of the best)",
    ]


def _ages(costs: dict[str, Any]) -> str:
    dropped = f", {costs['dropped']:.1%} of groups dropped" if costs["dropped"] else ""
    return (
        f"{costs['age_mean']:.1f} versions on average, {costs['age_max']} at most, of a group's oldest token; "
        f"{costs['over']:.1%} of groups over the bound, {costs['masked']:.1%} of tokens{dropped}; "
        f"length bias {costs['length']:.2f}"
    )


def _memory(found: dict[str, Any]) -> list[str]:
    if found["learner_bytes"] is None:
        return [f"memory      {found['memory_unknown']}"]
    return [
        f"memory      learner, a rank: {_held(found['learner_bytes'])}",
        f"            a replica: {_held(found['replica_bytes'])}",
    ]


def _held(parts: dict[str, int]) -> str:
    each = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    return f"{sum(parts.values()) / 2**30:.2f} GiB ({each})"
