"""The code behind a reward, by digest: found without importing it, for importing runs it."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def source_digest(use: str) -> str | None:
    """Digest of the file that holds a user's function; what it imports in turn does not count.

    None for a built-in reward, and where the file is not on this host or is no source file.
    """
    where, found, _ = use.rpartition(":")
    if not found:
        return None
    path = Path(where) if where.endswith(".py") else _file_of(where)
    try:
        return None if path is None else hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _file_of(module: str) -> Path | None:
    """The file of a dotted path, looked for where a worker process looks, which ends with its working folder."""
    places: list[str] = [*sys.path, os.getcwd()]
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), places)
        if spec is None:
            return None
        if count == len(parts):
            return Path(spec.origin) if spec.origin else None
        places = list(spec.submodule_search_locations or ())
    return None
