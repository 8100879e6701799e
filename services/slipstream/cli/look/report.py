"""`report`: a run as one HTML page that holds all its data and loads nothing."""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.look.find_run import find_run, open_ledger
from slipstream.cli.look.report_data import reported
from slipstream.cli.look.run_state import live_members
from slipstream.errors import EXIT_OK, LedgerError, UserError
from slipstream.run.folder import RunFolder

if TYPE_CHECKING:
    from slipstream.ledger.counts import Audit
    from slipstream.ledger.records import RunState


def report(options: argparse.Namespace) -> int:
    """Write the page of a run, live or ended; without its ledger the page says so and holds the rest."""
    folder, _ = find_run(options.run)
    state, audit, missing, there = asyncio.run(_book(options.run))
    target = Path(options.output)
    try:
        target.write_text(page(reported(folder, state, audit, missing, there)), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output: {target} cannot be written ({error.strerror})", "name another file"
        ) from None
    print(f"{folder.name}: {target} ({target.stat().st_size / 1024:.0f} KiB)")  # noqa: T201
    return EXIT_OK


async def _book(run: str) -> tuple[RunState | None, Audit | None, str, bool]:
    """The ledger's word, or why there is none: a report is worth having without it. At last, whether the run is in
    anybody's hands."""
    try:
        async with open_ledger(run) as (folder, ledger):
            there = folder.held_elsewhere or bool(await live_members(folder, ledger))
            return await ledger.state(), await ledger.audit(), "", there
    except (LedgerError, UserError) as error:
        return None, None, f"The ledger cannot be read: {error}", False


def page(data: dict[str, Any]) -> str:
    """The page of this data. Scripts in the data cannot run: it is JSON, read as text, behind a content policy."""
    style, script = _part("report.css"), _part("report.js")
    text = (
        json.dumps(data, ensure_ascii=False, allow_nan=False)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
    )
    filled = {
        "title": html.escape(f"{data['run']} · slipstream"),
        "style": style,
        "script": script,
        "style_hash": _digest(style),
        "script_hash": _digest(script),
        "data": text,
    }
    result = _part("report.html")
    for name, value in filled.items():
        before, found, after = result.partition("{" + name + "}")
        if found:
            result = before + value + after
    return result


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


__all__ = ["RunFolder", "page", "report"]
