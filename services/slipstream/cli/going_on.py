"""A run whose folder exists: whether it is the same one that shall go on, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.config.load import load_recorded
from slipstream.config.local_paths import absolute
from slipstream.config.rules import resolved
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import MARKER, step_of
from slipstream.learner.checkpoint.going_back import consent_to, withdraw
from slipstream.learner.checkpoint.identity import differing, known_at_start, refuse_changed_since, tell
from slipstream.run.folder import RunFolder

log = logging.getLogger("slipstream.cli")
_SHOWN = 8
_NOT_SHOWN = ("run.name", "run.root", "run.accept")


def refuse_another_run(config: Config, folder: RunFolder, asked: str) -> None:
    """See that a run which goes on is the one in its folder, before any process starts.

    The newest checkpoint says what it was; without one, the recorded config of steps that were made.

    Args:
        config: The config as it would go on.
        folder: The run's folder.
        asked: The command: `up` did not say that it wants to go on, `resume` did.

    Raises:
        UserError: Names everything that changed and may not, with both values.
    """
    identity = known_at_start(config)
    try:
        refuse_changed_since(folder.checkpoints, identity, config.run.accept)
        if not any(folder.checkpoints.glob(f"step-*/{MARKER}")):
            _refuse_unlike_recorded(config, folder, identity)
    except UserError as error:
        if asked != "up":
            raise
        raise UserError(
            f"run {folder.path} exists, and this is another: {error.problem}",
            f"give another run.name, or go on with it as it is: slipstream resume {folder.path}; {error.mend}",
        ) from None


def _refuse_unlike_recorded(config: Config, folder: RunFolder, identity: Mapping[str, Any]) -> None:
    recorded = recorded_config(folder)
    if recorded is None or not folder.steps.exists() or not folder.steps.stat().st_size:
        return
    before = known_at_start(recorded)
    changed = [name for name in differing(before, identity) if name not in config.run.accept]
    if changed:
        raise UserError(f"the run cannot go on: {tell(before, identity, changed)}", "set it back")


def settle_going_back(folder: RunFolder, named: str | None) -> int | None:
    """Write the consent to go back to a checkpoint and say what it gives up; returns its step. One that was not
    carried out counts no more when it is not given again.

    Raises:
        UserError: Nothing can continue from that checkpoint.
    """
    if named is None:
        withdraw(folder)
        return None
    step, lines = consent_to(folder, named)
    for line in lines:
        log.warning("%s", line)
    return step


def tell_going_on(
    config: Config, before: Config | None, folder: RunFolder, asked: str, back: int | None = None
) -> None:
    """Say that a run goes on, from where, and which settings have changed since its last attempt.

    Args:
        config: The config as it goes on.
        before: The config of the attempt before this one; None for a run that begins.
        folder: The run's folder.
        asked: The command.
        back: The step of the older checkpoint that it goes back to.
    """
    if before is None:
        return
    steps = [
        step
        for path in folder.checkpoints.glob(f"step-*/{MARKER}")
        if (step := step_of(path.parent)) is not None
    ]
    place = (
        f"from its checkpoint of step {max(steps) if back is None else back}"
        if steps
        else "from its start, for it has no checkpoint"
    )
    if asked == "up":
        log.warning(
            "run %s exists: going on with it %s; to begin a new one, give another run.name", folder.name, place
        )
    else:
        log.info("going on with run %s %s", folder.name, place)
    changed = list(_changes(absolute(resolved(before)), absolute(resolved(config))))
    if changed:
        more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        log.warning("changed since its last attempt: %s%s", "; ".join(changed[:_SHOWN]), more)


def recorded_config(folder: RunFolder) -> Config | None:
    """The config of a run's last attempt, None where there is none that this version can read."""
    try:
        return load_recorded(folder.config)[0] if folder.config.is_file() else None
    except UserError:
        return None


def _changes(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _changes(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now and path not in _NOT_SHOWN:
        yield f"{path} is {now!r} and was {before!r}"
