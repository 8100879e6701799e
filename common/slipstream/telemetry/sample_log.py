"""Samples for a person to read: JSON lines in the run's folder, bounded in size.

When a file reaches its cap every second line of its older half goes, so that it always spans the whole run and is
densest where the run is now.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from slipstream.protocol.messages import Group, Sample
from slipstream.run.folder import append_line
from slipstream.telemetry.sinks.sink import Sampled

log = logging.getLogger("slipstream.telemetry")
SHOWN_SAMPLES = 4
LONGEST_TEXT = 4000


def sampled(record: dict[str, Any]) -> list[Sampled]:
    """The samples of one line of the file."""
    found = []
    for sample in record["samples"]:
        text = "".join(sample["tokens"]) + (
            f" [{sample['omitted']} tokens of its middle left out]" if sample["omitted"] else ""
        )
        finish = f"unscored: {sample['unscored']}" if sample["reward"] is None else sample["finish"]
        found.append(Sampled(record["prompt"], text, sample["reward"], finish))
    return found


def is_sent(step: int) -> bool:
    """Whether a step's samples go to the sinks: of every step up to 200, then ever fewer: a run has no end."""
    return step % max(1, step // 100) == 0


def group_record(group: Group, reason: str) -> dict[str, Any]:
    """One line for a file of groups that were not trained on."""
    return {
        "time": time.time(),
        "reason": reason,
        "ticket": group.ticket,
        "attempt": group.attempt,
        "version": group.admitted_version,
        "prompt": group.prompt[:LONGEST_TEXT],
        "columns": {
            name: value for name, value in group.columns.items() if isinstance(value, str | int | float)
        },
        "samples": [_shown(sample) for sample in group.samples[:SHOWN_SAMPLES]],
    }


def _shown(sample: Sample) -> dict[str, Any]:
    return {
        "text": sample.text[:LONGEST_TEXT],
        "length": sample.tokens,
        "finish": sample.finish,
        "versions": sample.versions,
        "reward": sample.reward,
        "components": sample.components,
        "unscored": sample.unscored,
    }


class SampleLog:
    """One file of samples, written by one process. What cannot be written is told once and left out."""

    def __init__(self, path: Path, megabytes: float) -> None:
        self._path = path
        self._cap = int(megabytes * (1 << 20))
        self._complained = False

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; a full disk costs the record, never the run."""
        try:
            append_line(self._path, record)
            if self._path.stat().st_size > self._cap:
                self._thin()
        except OSError as error:
            if not self._complained:
                log.warning("samples are not kept in %s: %s", self._path, error)
            self._complained = True

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        older = lines[: len(lines) // 2]
        kept = [*older[::2], *lines[len(older) :]]
        while sum(map(len, kept)) > self._cap and len(kept) > 1:
            kept = kept[1::2]
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(self._path)
