"""Take from older checkpoints what only an exact resume needs; their weights stay."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from slipstream.learner.checkpoint.checkpoint_files import FileEntry, fsync_path
from slipstream.learner.checkpoint.finding import entries, has_sizes, sealed, until_whole
from slipstream.learner.checkpoint.writing import Writer, write


def thin(root: Path, keep_last: int, pattern: str, spare: int | None = None) -> list[Path]:
    """Write older checkpoints anew without some of their files; returns those that were changed.

    The files that stay are linked, not copied. The old folder is renamed aside before the new one takes its place: at
    each instant there is a complete checkpoint of the step, for a moment under the hidden name alone. One whose files
    are not those that it names is left as it is.

    Args:
        root: Folder of all checkpoints; nobody else writes to it.
        keep_last: So many of the newest that are whole stay as they are.
        pattern: Names of the files to take out, as fnmatch has it.
        spare: A step that stays as it is for now, because somebody reads it.

    Raises:
        UserError: The folder cannot be written.
    """
    changed = []
    found = sealed(root)
    for step, path in found[until_whole(found, keep_last) :]:
        files = entries(path, "*")
        left = {name: entry for name, entry in files.items() if not fnmatch.fnmatch(name, pattern)}
        if step != spare and len(left) < len(files) and has_sizes(path, left):
            changed.append(write(root, step, _links(path, left), read_back=False))
    return changed


def _links(folder: Path, files: Mapping[str, FileEntry]) -> dict[str, Writer]:
    return {name: _link(folder / name, entry) for name, entry in files.items()}


def _link(source: Path, entry: FileEntry) -> Writer:
    def write_it(target: Path) -> FileEntry:
        try:
            os.link(source, target)
        except OSError:  # not every file system has hard links
            shutil.copyfile(source, target)
            fsync_path(target)
        return entry

    return write_it
