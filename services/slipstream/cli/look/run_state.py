"""What a run is doing, from its folder and its ledger: the one source of `status`, `top` and `report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.run.attempt_end import End, end_of
from slipstream.run.folder import RunFolder, line_of_descent, read_lines

if TYPE_CHECKING:
    from slipstream.ledger.client import Ledger
    from slipstream.ledger.counts import Counts
    from slipstream.ledger.records import MemberInfo, RunState

ROLES = ("rollout", "reward", "buffer", "learner")
STOPPED = "stopped"
_RECENT = 10


@dataclass
class StepsFile:
    """The lines of a growing file, read once each; a line that is not whole yet is read next time."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All lines so far, of the line of descent that counts."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError):
                    self.lines.append(json.loads(line))
        self.lines = line_of_descent(self.lines)
        return self.lines


@dataclass(frozen=True)
class Look:
    """A run at one moment. `held` says whether an `up` has it in hand, `end` how its newest attempt ended."""

    name: str
    folder: Path
    planned: int | None
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    state: RunState
    counts: Counts
    members: list[MemberInfo]
    warnings: list[dict[str, Any]] = field(default_factory=list)
    held: bool = True
    end: End | None = None

    @property
    def status(self) -> str:
        """The ledger's word, but `stopped` for a run that has not finished and that nobody has in hand."""
        return status_of(self.state, self.held or bool(self.members))

    @property
    def concerns(self) -> list[str]:
        """What the learner says is wrong with the run now."""
        return open_concerns(self.warnings)

    @property
    def last(self) -> dict[str, Any]:
        """The newest step's line, or nothing yet."""
        return self.steps[-1] if self.steps else {}

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens trained a second over the last steps."""
        recent = self.steps[-_RECENT:]
        seconds = sum(step["seconds"] for step in recent)
        return sum(step["tokens"] for step in recent) / seconds if seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the planned number of steps is made, at the speed of the last ones."""
        recent = self.steps[-_RECENT:]
        if self.planned is None or not recent:
            return None
        return max(0, self.planned - self.state.step) * sum(step["seconds"] for step in recent) / len(recent)

    @property
    def missing(self) -> list[str]:
        """Roles of which nobody is there, in a run that goes on."""
        there = {member.role for member in self.members}
        return (
            []
            if self.status in ("finished", "halted", STOPPED)
            else [role for role in ROLES if role not in there]
        )

    def as_json(self) -> dict[str, Any]:
        """For scripts: plain values; a name's meaning never changes."""
        last, counts, conservation = self.last, self.counts, self.counts.conservation()
        return {
            "run": self.name,
            "folder": str(self.folder),
            "status": self.status,
            "finish_reason": self.state.finish_reason,
            "step": self.state.step,
            "planned_steps": self.planned,
            "durable_step": self.state.durable_step,
            "version": self.state.version,
            "seconds_left": _rounded(self.seconds_left),
            "tokens_per_second": _rounded(self.tokens_per_second),
            "reward": last.get("reward"),
            "response_tokens": last.get("length"),
            "age_mean": last.get("age_mean"),
            "age_max": last.get("age_max"),
            "max_staleness": self.state.terms.max_staleness,
            "bottleneck": last.get("bottleneck"),
            "load": last.get("load", {}),
            "limit_ratio": last.get("limit_ratio"),
            "evaluations": newest_evaluations(self.evaluations),
            "groups": {
                "issued": counts.issued,
                "open": counts.open,
                "cap": self.state.terms.cap,
                **counts.groups,
            },
            "tokens": {**counts.tokens, "discarded": counts.tokens_discarded},
            "dropped": counts.dropped,
            "failed": counts.failed,
            "unscored": counts.unscored,
            "warnings": self.concerns,
            "equation": {"holds": conservation.holds, "line": conservation.line},
            "failures_in_row": self.state.failures_in_row,
            "last_failure": self.state.last_failure,
            "missing_roles": self.missing,
            "processes": [self._process(member) for member in self.members],
        }

    def _process(self, member: MemberInfo) -> dict[str, Any]:
        served = member.version if member.version >= 0 else None
        lag = None if served is None else max(0, self.state.version - served)
        what = {"id": member.id, "role": member.role, "host": member.host, "pid": member.pid}
        return what | {"version": served, "lag": lag, "metrics_port": member.metrics_port, **member.detail}


async def look_at(
    folder: RunFolder, planned: int | None, ledger: Ledger, steps: StepsFile | None = None
) -> Look:
    """Look once.

    Raises:
        LedgerError: The ledger does not answer, or nobody has opened the run in it.
    """
    return Look(
        name=folder.name,
        folder=folder.path,
        planned=planned,
        steps=list((steps or StepsFile(folder.steps)).read()),
        evaluations=read_lines(folder.evaluations),
        state=await ledger.state(),
        counts=await ledger.counts(),
        members=await live_members(folder, ledger),
        warnings=read_lines(folder.warnings),
        held=folder.held_elsewhere,
        end=end_of(folder),
    )


async def live_members(folder: RunFolder, ledger: Ledger) -> list[MemberInfo]:
    """Who takes part. Of a server that was started to look at its files nobody does, whatever leases they hold."""
    return [] if folder.held_here else await ledger.members()


def without_ledger(look: Look, folder: RunFolder) -> Look:
    """The last look, with what the folder of an ended run says of its end."""
    end = end_of(folder)
    state = msgspec.structs.replace(look.state, status="finished") if end and end.finished else look.state
    return replace(look, members=[], held=False, end=end, state=state)


def status_of(state: RunState, there: bool) -> str:
    """The ledger's word; but a run that was killed, or halted and left by all, is stopped."""
    return state.status if there or state.status == "finished" else STOPPED


def open_concerns(warnings: Sequence[dict[str, Any]]) -> list[str]:
    """Of the lines of warnings.jsonl the texts of those that are not over."""
    newest = {record["kind"]: record for record in warnings}
    return [record["text"] for record in newest.values() if not record["over"]]


def newest_evaluations(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest scored evaluation of each set."""
    return {
        record["set"]: {name: record[name] for name in ("step", "version", "reward", "scored")}
        for record in records
        if record["reward"] is not None
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
