"""Samples for a person to read: JSON lines in the run's folder, bounded in size.

When a file reaches its cap every second line of its older half goes, so that it always spans the whole run and is
densest where the run is now.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slipstream.run_folder import append_line

log = logging.getLogger("slipstream.telemetry")


class SampleLog:
    """One file of samples, written by one process. What cannot be written is told once and left out."""

    def __init__(self, path: Path, megabytes: float) -> None:
        self._path = path
        self._cap = int(megabytes * (1 << 20))
        self._complained = False

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; a full disk or a number that is not finite costs the record, never the run."""
        try:
            append_line(self._path, record)
            if self._path.stat().st_size > self._cap:
                self._thin()
        except (OSError, ValueError) as error:
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
