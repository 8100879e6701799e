"""`metrics docs` and `metrics targets`: what can be scraped, and where."""

from __future__ import annotations

import argparse
import asyncio
import json

from slipstream.cli.look.find_run import open_ledger
from slipstream.errors import EXIT_OK
from slipstream.ledger.records import MemberInfo


def docs(options: argparse.Namespace) -> int:
    """Print the reference of all metrics as Markdown."""
    from slipstream.learner.step.objective_metrics import objective_metrics
    from slipstream.telemetry.metrics_page import markdown

    print(markdown(objective_metrics()), end="")  # noqa: T201
    return EXIT_OK


def targets(options: argparse.Namespace) -> int:
    """Print where the processes of a live run serve their metrics, as Prometheus' file_sd reads it."""
    print(json.dumps(asyncio.run(_targets(options.run)), indent=2))  # noqa: T201
    return EXIT_OK


async def _targets(run: str) -> list[dict[str, object]]:
    async with open_ledger(run) as (_, ledger):
        return [_target(member) for member in await ledger.members() if member.metrics_port]


def _target(member: MemberInfo) -> dict[str, object]:
    host = member.endpoint.rpartition("://")[2].rpartition(":")[0] or "127.0.0.1"
    labels = {"role": member.role, "process": member.id}
    return {"targets": [f"{host}:{member.metrics_port}"], "labels": labels}
