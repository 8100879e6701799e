"""Take from older checkpoints what only an exact resume needs; their weights stay."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slipstream.checkpoint.files import MANIFEST, FileEntry, FolderManifest, fsync_path
from slipstream.checkpoint.finding import sealed
from slipstream.checkpoint.writing import Writer, write


def thin(root: Path, keep_last: int, pattern: str) -> list[Path]:
    """Write older checkpoints anew without some of their files; returns those that were changed.

    The files that stay are linked, not copied, and the new folder takes the old one's place in one rename: at each
    instant there is a complete checkpoint of the step.

    Args:
        root: Folder of all checkpoints; nobody else writes to it.
        keep_last: So many of the newest stay as they are.
        pattern: Names of the files to take out, as fnmatch has it.

    Raises:
        UserError: The folder cannot be written.
    """
    changed = []
    for step, path in sealed(root)[keep_last:]:
        files = msgspec.json.decode((path / MANIFEST).read_bytes(), type=FolderManifest).files
        if any(fnmatch.fnmatch(name, pattern) for name in files):
            changed.append(write(root, step, _links(path, files, pattern)))
    return changed


def _links(folder: Path, files: Mapping[str, FileEntry], pattern: str) -> dict[str, Writer]:
    return {
        name: _link(folder / name, entry) for name, entry in files.items() if not fnmatch.fnmatch(name, pattern)
    }


def _link(source: Path, entry: FileEntry) -> Writer:
    def write_it(target: Path) -> FileEntry:
        try:
            os.link(source, target)
        except OSError:  # not every file system has hard links
            shutil.copyfile(source, target)
            fsync_path(target)
        return entry

    return write_it
