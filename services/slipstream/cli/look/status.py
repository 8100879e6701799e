"""`status`: where a run stands, for a person in a few lines or for a script as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json

from slipstream.cli.look.find_run import open_ledger
from slipstream.cli.look.run_state import STOPPED, Look, look_at
from slipstream.config.load import load_recorded
from slipstream.errors import EXIT_OK
from slipstream.ledger.counts import by_reason


def status(options: argparse.Namespace) -> int:
    """Print where a run stands; works on a live run and on one that has ended."""
    look = asyncio.run(_look(options.run))
    print(json.dumps(look.as_json(), indent=2) if options.json else _for_a_person(look))  # noqa: T201
    return EXIT_OK


async def _look(run: str) -> Look:
    async with open_ledger(run) as (folder, ledger):
        config, _ = load_recorded(folder.config)
        return await look_at(folder, config.run.steps, ledger)


def _for_a_person(look: Look) -> str:
    state, last = look.state, look.last
    why = state.finish_reason if look.status != STOPPED else ""  # of a stop another line says it
    head = f"{look.name}: {look.status}{f' ({why})' if why else ''}"
    lines = [
        f"{head}, step {state.step}{f' of {look.planned}' if look.planned else ''}, version {state.version}"
    ]
    if look.status == STOPPED:
        lines.append(stopped(look))
    if last:
        lines.append(
            f"reward {last['reward']:.3f}, {last['length']:.0f} tokens a completion, age {last['age_mean']:.1f} "
            f"(max {last['age_max']}, bound {state.terms.max_staleness}), {look.tokens_per_second:.0f} tokens/s"
        )
    if "bottleneck" in last:
        loads = ", ".join(f"{stage} {load:.0%}" for stage, load in last["load"].items())
        lines.append(
            f"limited by {last['bottleneck']}; loads: {loads}; {last['limit_ratio']:.0%} of the speed limit"
        )
    if look.seconds_left and look.status == "running":
        lines.append(f"about {duration(look.seconds_left)} left")
    lines.append(look.counts.conservation().line)
    if look.counts.unscored:
        samples = sum(look.counts.unscored.values())
        lines.append(f"{samples} samples are unscored ({by_reason(look.counts.unscored)})")
    lines += [f"warning: {text}" for text in look.concerns]
    for member in look.members:
        served = f"version {member.version}" if member.version >= 0 else ""
        lines.append(f"  {member.id:<12} {member.host}:{member.pid}  {served}".rstrip())
    if look.missing and look.status == "running":
        lines.append(f"nobody is there as {', '.join(look.missing)}")
    if state.failures_in_row:
        lines.append(f"{state.failures_in_row} failed attempts in a row; the last: {state.last_failure}")
    return "\n".join(lines)


def stopped(look: Look) -> str:
    """How the run came to stop, and how to go on."""
    if look.end is None:
        how = "was ended from outside"
    else:
        code, cause, _ = look.end
        how = f"ended: {cause}" if cause else f"ended with exit code {code}" if code else "was asked to stop"
    return f"nobody is there: it {how}; to go on: slipstream resume {look.folder}"


def duration(seconds: float) -> str:
    """Such as 45 s, 12 min or 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
