"""Where the run writes: its root, and the store that its checkpoints are copied to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.run.stores import open_store

_UPLOAD = "learner.checkpoint.upload"


def root(config: Config) -> Iterator[str]:
    """A root that cannot be made or written; nothing is made to find out."""
    path = Path(config.run.root).absolute()
    place = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not place.is_dir():
        yield f"run.root {config.run.root!r}: {place} is no folder; choose another"
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"run.root {config.run.root!r}: {place} cannot be written; choose a writable folder"


def keys(config: Config) -> Iterator[str]:
    """A folder that should hold the run's key and does not."""
    folder = config.network.keys
    if folder is not None and not (Path(folder) / "curve.key").is_file():
        yield f"network.keys {folder!r}: no curve.key there; make one: slipstream keys {folder}"


def upload_scheme(config: Config) -> Iterator[str]:
    """A store of no known kind, or of one whose package is not installed."""
    if config.learner.checkpoint.upload is not None:
        open_store(config.learner.checkpoint.upload, _UPLOAD)
    yield from ()


def upload_rights(config: Config) -> Iterator[str]:
    """A store that refuses what we write, by writing and removing a file of nothing."""
    url = config.learner.checkpoint.upload
    if url is None:
        return
    try:
        system, path = open_store(url, _UPLOAD)
    except UserError:  # said already
        return
    probe = f"{path}/.slipstream-may-write"
    try:
        system.makedirs(path, exist_ok=True)
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except Exception as error:  # noqa: BLE001  (somebody else's library and somebody else's server)
        line = (str(error).splitlines() or [type(error).__name__])[0]
        yield f"{_UPLOAD} {url!r} cannot be written ({line}); check the place and its credentials"
