"""`weights verify` and `weights bench`: whether replicas serve what the learner made, and how fast it travels."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import EXIT_FAULT, EXIT_OK, UserError, install
from slipstream.run.folder import RunFolder
from slipstream.secrets import redis_password

if TYPE_CHECKING:
    from slipstream.ledger.records import MemberInfo

PATIENCE_SECONDS = 10.0
LATER_SECONDS = 1.5  # a heartbeat and a half


def verify(options: argparse.Namespace) -> int:
    """Compare the fingerprints of a live run's replicas with the learner's; exit 1 when one differs."""
    from slipstream.config.load import load_recorded

    path = Path(options.run).resolve()
    if not (path / "config.yaml").is_file():
        raise UserError(f"{options.run} holds no run", "give the folder of a run, such as runs/NAME")
    folder = RunFolder(path.parent, path.name)
    config, _ = load_recorded(folder.config)
    url = config.redis.url or folder.live_url
    if url is None:
        raise UserError(f"{options.run} is not running", "start it; fingerprints are those of live processes")
    lines, same = compare(*asyncio.run(_members(url, folder.name)))
    print("\n".join(lines))  # noqa: T201
    return EXIT_OK if same else EXIT_FAULT


def compare(members: list[MemberInfo], later: list[MemberInfo]) -> tuple[list[str], bool]:
    """A line for each process that has weights, and whether no replica differs from the learner.

    The learner's fingerprints are also taken from a later look: its heartbeat may lag behind the replicas.
    """
    known: dict[str, str] = {}
    for member in [*members, *later]:
        known |= member.detail.get("fingerprints", {}) if member.role == "learner" else {}
    newest = max(map(int, known), default=-1)
    lines = [f"{'learner':16} version {newest:6} {known.get(str(newest), 'has published nothing yet')}"]
    same = True
    for member in members:
        if member.role != "rollout":
            continue
        found, wanted = member.detail.get("fingerprint", ""), known.get(str(member.version))
        verdict = "serves nothing yet" if not found else "the same" if found == wanted else "DIFFERS"
        if found and wanted is None:
            verdict = "a version that the learner does not remember"
        same &= verdict != "DIFFERS"
        deviation = member.detail.get("deviation")
        heard = "" if deviation is None else f", says the same within {deviation:.2g}"
        lines.append(f"{member.id:16} version {member.version:6} {found} {verdict}{heard}")
    return lines, same


async def _members(url: str, run: str) -> tuple[list[MemberInfo], list[MemberInfo]]:
    from slipstream.ledger.client import Ledger

    async with await Ledger.connect(url, run, password=redis_password(), deadline=PATIENCE_SECONDS) as ledger:
        members = await ledger.members()
        await asyncio.sleep(LATER_SECONDS)
        return members, await ledger.members()


def bench(options: argparse.Namespace) -> int:
    """Measure every link of this machine and print the table."""
    import numpy as np

    from slipstream.weights.bench import measure, row

    data = np.ones((options.megabytes << 8, 1024), np.float32)
    gigabytes = data.nbytes / 1e9
    print(f"{gigabytes:.3f} GB; GB/s counts delivered bytes, CPU seconds are per GB delivered")  # noqa: T201
    print(f"{'link':8} {'receivers':>9} {'ms':>8} {'GB/s':>7} {'CPU s/GB':>9} {'stall of memcpy':>16}")  # noqa: T201
    links = ["shm", "tcp", "tcp+key", "file"] + (["ucx"] if importlib.util.find_spec("ucxx") else [])
    for link in links:
        for receivers in (1, 3):
            found = row(link, receivers, gigabytes, measure(link, receivers, data, options.repeats))
            print(  # noqa: T201
                f"{link:8} {receivers:9} {found.milliseconds:8.1f} {found.gb_per_s:7.2f} "
                f"{found.cpu_s_per_gb:9.3f} {found.stall_of_memcpy:16.2f}"
            )
    if "ucx" not in links:
        print(f"ucx is not measured: UCXX is not installed ({install('ucx')})")  # noqa: T201
    return EXIT_OK
