"""Whether every rank sees the folder that all of them write checkpoints to: known at the start, not at a save."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import torch

from slipstream.errors import UserError
from slipstream.learner.ranks.ranks import Ranks

SEE_SECONDS = 15.0
"""A network file system may show a new file late."""
_POLL_S = 0.05


def see_common_root(ranks: Ranks, folder: Path | None) -> None:
    """Compare what the ranks see; all of them call it, and all decide alike.

    Args:
        ranks: This process's place.
        folder: Rank 0's: the run's folder. None on the others, which are told.

    Raises:
        UserError: A rank doesn't see it, or rank 0 cannot write there.
    """
    if ranks.size == 1:
        return
    mark = _mark(folder) if folder is not None else None
    try:
        told = ranks.share([str(mark or "").encode()] if ranks.leads else None)[0].decode()
        blind = torch.zeros(ranks.size)
        blind[ranks.rank] = not told or not _comes(Path(told))
        unseeing = ranks.add_up(blind).nonzero().flatten().tolist()
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    if unseeing:
        where = Path(told).parent if told else "the run's folder, where rank 0 cannot write"
        names = ", ".join(map(str, unseeing))
        raise UserError(
            f"run.root: of {ranks.size} learner ranks {names} do not see {where}, to which all write checkpoints",
            "set run.root to a folder on a disk that every rank's host has at the same path",
        )


def _mark(folder: Path) -> Path | None:
    """A new file that nobody else can have by chance."""
    path = folder.absolute() / f".ranks-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return None
    return path


def _comes(path: Path) -> bool:
    deadline = time.monotonic() + SEE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
