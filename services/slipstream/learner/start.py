"""Warm start: a new run that begins with the weights of another run's checkpoint, and with nothing else of it.

Moments, counts, random states and the ledger are its own, so objective, data, seed and reference may differ.
It decides only where a run without a checkpoint of its own begins; a resume never looks at it.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.checkpoint.files import MARKER, step_of
from slipstream.checkpoint.finding import newest_complete, verify
from slipstream.errors import UserError

_MEND = "give the folder of a run, or of one of its checkpoints (RUN/checkpoints/step-…)"


def look_for_start(source: str) -> None:
    """See that there is a checkpoint to start from, without reading it.

    Raises:
        UserError: There is none.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        raise UserError(f"learner.start_from {source!r}: no such folder", _MEND)
    if step_of(path) is None and not list((path / "checkpoints").glob(f"step-*/{MARKER}")):
        raise UserError(f"learner.start_from {source!r} holds no complete checkpoint", _MEND)


def start_checkpoint(source: str) -> Path:
    """The checkpoint to start from, each of its bytes verified.

    Args:
        source: `learner.start_from`: a run's folder for its newest complete checkpoint, or a checkpoint's.

    Raises:
        UserError: There is none, or the one named is damaged.
    """
    look_for_start(source)
    path = Path(source).expanduser()
    if step_of(path) is not None:
        if problems := verify(path):
            raise UserError(f"learner.start_from {source!r}: {problems[0]}", "name another checkpoint")
        return path
    found = newest_complete(path / "checkpoints")
    if found.path is None:
        raise UserError(f"learner.start_from {source!r} holds no complete checkpoint", _MEND)
    return found.path
