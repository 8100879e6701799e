"""What `plan` predicts from: numbers of a finished run, or numbers that were given, as a pipeline to simulate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean
from typing import Any

from slipstream.cli.look.find_run import find_run
from slipstream.cli.plan.simulation import Pipeline
from slipstream.config.load import load_recorded
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.run.folder import line_of_descent, read_lines

Steps = Sequence[dict[str, Any]]
WARM_UP = 5  # steps whose times are those of a start
QUANTILES = 512
LEAST_STEPS = 5
FLOOR = 0.5
_USED = ("seconds", "tokens", "parts", "score_seconds", "longest", "lengths")


def pipeline_of(
    config: Config, options: argparse.Namespace, version_bytes: float | None
) -> tuple[Pipeline, str]:
    """The pipeline of a config, and where its numbers are from. A given number goes before a measured one.

    Args:
        config: What is to be run.
        options: The command's options.
        version_bytes: Bytes of one version, if the model is at hand; with a bandwidth they give the sync time.

    Raises:
        UserError: No such run, one with too few steps, or a number that is neither measured nor given.
    """
    measured, source = (None, "given numbers")
    if options.run is not None:
        folder, _ = find_run(options.run)
        steps = line_of_descent(read_lines(folder.steps))
        measured = from_run(load_recorded(folder.config)[0], steps, options.decode_floor)
        source = f"{len(_usable(steps))} steps of {folder.name}"
    if measured is None:
        measured = _from_options(config, options)
    pipeline = for_config(config, measured)
    given: dict[str, Any] = {"step_seconds": options.step_seconds, "score_seconds": options.score_seconds}
    if options.mean_length is not None:
        given["lengths"] = lognormal(options.mean_length, options.sigma, config.sampling.max_new_tokens)
    if options.tokens_per_second is not None:
        given["token_seconds"] = pipeline.slots / options.tokens_per_second
    if options.bandwidth is not None and version_bytes is not None:
        given["sync_seconds"] = version_bytes / (options.bandwidth * 1e6)
    return replace(pipeline, **{name: value for name, value in given.items() if value is not None}), source


def for_config(config: Config, measured: Pipeline) -> Pipeline:
    """A measured pipeline with the sizes of a config; the learner's time goes with the samples of a step."""
    batch, stale = config.batch, config.staleness
    work = batch.groups * batch.group_size / (measured.groups * measured.group_size)
    slots = config.rollout.engine.max_sequences
    return replace(
        measured,
        groups=batch.groups,
        group_size=batch.group_size,
        replicas=config.rollout.replicas,
        slots=slots,
        token_seconds=measured.decode_seconds(slots),
        step_seconds=measured.step_seconds * work,
        policy=stale.policy,
        eta=stale.max_staleness,
        oversampling=stale.oversampling,
    )


def from_run(config: Config, steps: Steps, floor: float = FLOOR) -> Pipeline:
    """The pipeline that a run's steps show; its first steps are left out.

    The speed of decoding follows from the share of the slots that were in use, and `floor` from nothing: one run
    has only one load.

    Raises:
        UserError: Too few steps, or next to nothing sampled in them.
    """
    steps = _usable(steps)
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"the run has {len(steps)} steps after its start", f"plan from one with {LEAST_STEPS} or more"
        )
    seconds = fmean(step["seconds"] for step in steps)
    tokens = fmean(step["tokens"] for step in steps)
    load = fmean(step["load"]["generate"] for step in steps)
    lengths = run_lengths(steps)
    if load <= 0 or tokens <= 0 or not lengths:
        raise UserError(
            "the run has sampled nothing after its start", "plan from one whose generators were busy"
        )
    # those that ran: in containers and pods their number is not the config's
    slots, replicas = config.rollout.engine.max_sequences, fmean(_replicas(step, config) for step in steps)
    decode = seconds * load * slots * replicas / tokens  # of one step with the load that there was
    return Pipeline(
        lengths=lengths,
        groups=config.batch.groups,
        group_size=config.batch.group_size,
        replicas=max(1, round(replicas)),
        slots=slots,
        token_seconds=decode / (floor + (1 - floor) * load),
        floor=floor,
        step_seconds=fmean(step["seconds"] - step["parts"].get("wait", 0.0) for step in steps),
        score_seconds=fmean(step["score_seconds"] for step in steps),
        sync_seconds=fmean(step["stages"]["sync"] for step in steps),
        policy=config.staleness.policy,
        eta=config.staleness.max_staleness,
        oversampling=config.staleness.oversampling,
    )


def _usable(steps: Steps) -> Steps:
    """The steps after the start that tell all that is used; those before two looks at the members do not."""
    return [
        step
        for step in steps[WARM_UP:]
        if all(name in step for name in _USED)
        and "generate" in step.get("load", {})
        and "sync" in step.get("stages", {})
    ]


def _replicas(step: dict[str, Any], config: Config) -> int:
    return int(step.get("replicas") or config.rollout.replicas)


def run_lengths(steps: Steps) -> list[int]:
    """Lengths as the steps' histograms have them, a few hundred of them; none if nothing was sampled."""
    longest, bins = steps[-1]["longest"], len(steps[-1]["lengths"])
    same = [step["lengths"] for step in steps if (step["longest"], len(step["lengths"])) == (longest, bins)]
    counts = [sum(column) for column in zip(*same, strict=True)]
    inside: list[list[int]] = [[] for _ in range(bins)]
    for length in range(longest + 1):
        inside[length * bins // (longest + 1)].append(length)
    total = max(1, sum(counts))
    found: list[int] = []
    for count, lengths in zip(counts, inside, strict=True):
        if lengths:
            each = round(count * QUANTILES / total)
            found += [max(1, lengths[at % len(lengths)]) for at in range(each)]
    return found


def lognormal(mean: float, sigma: float, longest: int) -> list[int]:
    """Quantiles of a log-normal distribution of this mean before it is cut at the longest."""
    normal = NormalDist()
    drawn = (normal.inv_cdf((at + 0.5) / QUANTILES) for at in range(QUANTILES))
    return [max(1, min(longest, round(mean * math.exp(sigma * z - sigma**2 / 2)))) for z in drawn]


def _from_options(config: Config, options: argparse.Namespace) -> Pipeline:
    needed = ("mean_length", "tokens_per_second", "step_seconds")
    if missing := [name for name in needed if getattr(options, name) is None]:
        raise UserError(
            f"a plan needs --{missing[0].replace('_', '-')}",
            "give it, or the folder of a run of this kind: --from RUN",
        )
    slots = config.rollout.engine.max_sequences
    return Pipeline(
        lengths=lognormal(options.mean_length, options.sigma, config.sampling.max_new_tokens),
        groups=config.batch.groups,
        group_size=config.batch.group_size,
        replicas=config.rollout.replicas,
        slots=slots,
        token_seconds=slots / options.tokens_per_second,
        floor=options.decode_floor,
        step_seconds=options.step_seconds,
    )
