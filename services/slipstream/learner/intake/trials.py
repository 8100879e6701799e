"""What is being trained on stands in a file, so that a learner which dies of a group leaves word of it.

A group that kills its learner without an error (a crash in native code, memory, another rank) is found by the learner
after it. One that was there in two deaths is tried alone before it is trained on with others; if the learner dies of
that as well, it was that group. A death for another reason costs at most such a trial, and no group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.learner.batch.micro_batches import Scored
from slipstream.protocol.messages import Group

log = logging.getLogger("slipstream.learner")
DEATHS = 2  # in which a group was there, before it is tried alone
_REMEMBERED = 4096


class Trials:
    """Counts deaths by group, over restarts. A file that is damaged is begun anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = _read(path)
        trying, alone = list(map(str, found["trying"])), bool(found["alone"])
        self._deaths = {str(name): int(count) for name, count in found["deaths"].items()}
        self._fatal = set(map(str, found["fatal"]))
        if trying:
            log.warning("a learner has died while it trained on %d groups", len(trying))
        if alone:
            self._fatal.update(trying)
        else:
            self._deaths |= {name: self._deaths.get(name, 0) + 1 for name in trying}
        self._write([], alone=False)

    def fatal(self, groups: Scored) -> list[int]:
        """Places of those of which a learner has died when it tried them alone."""
        return [at for at, (group, _) in enumerate(groups) if _name(group) in self._fatal]

    def suspects(self, groups: Scored) -> list[int]:
        """Places of those that are to be tried alone first."""
        return [at for at, (group, _) in enumerate(groups) if self._deaths.get(_name(group), 0) >= DEATHS]

    def begin(self, groups: Scored, *, alone: bool = False) -> None:
        """Write down that these are being trained on, or tried `alone`."""
        self._write([_name(group) for group, _ in groups], alone)

    def end(self) -> None:
        """Write down that nothing is being trained on: whatever ends the learner now is no group's doing."""
        self._write([], alone=False)

    def acquit(self, groups: Scored) -> None:
        """Nothing is being trained on, and these are not what learners have died of; or they have left."""
        for group, _ in groups:
            self._deaths.pop(_name(group), None)
            self._fatal.discard(_name(group))
        self.end()

    def _write(self, trying: Sequence[str], alone: bool) -> None:
        self._deaths = dict(list(self._deaths.items())[-_REMEMBERED:])
        state = {"trying": trying, "alone": alone, "deaths": self._deaths, "fatal": sorted(self._fatal)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(self._path)


def _read(path: Path) -> dict[str, Any]:
    nothing: dict[str, Any] = {"trying": [], "alone": False, "deaths": {}, "fatal": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return nothing
    return nothing | found if isinstance(found, dict) else nothing


def _name(group: Group) -> str:
    return f"{group.ticket}.{group.attempt}"
