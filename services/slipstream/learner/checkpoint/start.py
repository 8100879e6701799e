"""Warm start: a new run that begins with the weights of another run's checkpoint, and with nothing else of it.

Moments, counts, random states and the ledger are its own, so objective, data, seed and reference may differ.
It decides only where a run without a checkpoint of its own begins; a resume never looks at it.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import MARKER, step_of
from slipstream.learner.checkpoint.finding import newest_complete, verify
from slipstream.run.folder import RunFolder

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


def pinned(config: Config, folder: RunFolder) -> Config:
    """The config with one checkpoint in `learner.start_from` where it names a run, which may train on and prune.

    All processes of the new run, its resumes and its replays must mean the same weights: what was recorded once is
    kept for as long as the same run is named.

    Args:
        config: A config that is about to be recorded.
        folder: The new run's folder.

    Raises:
        UserError: There is no checkpoint, and the run has none of its own to go on from.
    """
    source = config.learner.start_from
    if source is None:
        return config
    path = Path(source).expanduser().absolute()
    begun, own = _begun_with(folder, path), any(folder.checkpoints.glob("step-*"))
    if begun is not None and (own or begun.is_dir()):
        start = begun
    elif step_of(path) is not None or (own and not path.is_dir()):
        start = path
    else:
        start = start_checkpoint(source).absolute()
    return config.model_copy(update={"learner": config.learner.model_copy(update={"start_from": str(start)})})


def _begun_with(folder: RunFolder, source: Path) -> Path | None:
    """The checkpoint that the run's recorded config names, if it lies in this place."""
    if not folder.config.is_file():
        return None
    try:
        recorded = load_config(folder.config, environment={})[0].learner.start_from
    except UserError:  # of another version: it says nothing
        return None
    start = Path(recorded or ".").absolute()
    return start if step_of(start) is not None and start.resolve().is_relative_to(source.resolve()) else None
