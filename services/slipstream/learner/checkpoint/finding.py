"""Find complete checkpoints, check one, and remove old ones."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import (
    MANIFEST,
    MARKER,
    SCHEMA,
    FileEntry,
    FolderManifest,
    digest_file,
    fsync_path,
    remove,
    step_of,
    user_error,
)
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


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest complete checkpoint, or None where there is none; `skipped` are newer ones, with why."""

    path: Path | None
    step: int | None
    skipped: list[tuple[Path, str]]


def newest_complete(root: Path, refuse: Callable[[Path], str] = lambda path: "") -> FoundCheckpoint:
    """Look from the newest step down for a checkpoint whose every byte is as written.

    Args:
        root: Folder of all checkpoints.
        refuse: Why one that is complete is not wanted all the same; empty if it is.

    Raises:
        UserError: The folder cannot be read.
    """
    skipped = [(path, "was still being written") for path in _listed(root) if path.name.endswith(".writing")]
    for step, path in _candidates(root):
        problem = next(iter(verify(path)), "") or refuse(path)
        if not problem:
            newer = [(left, why) for left, why in skipped if _claimed_step(left) > step]
            return FoundCheckpoint(path, step, newer)
        skipped.append((path, problem))
    return FoundCheckpoint(None, None, skipped)


def complete(root: Path) -> list[tuple[int, Path]]:
    """Every checkpoint whose every byte is as written, by its step, oldest first.

    Raises:
        UserError: The folder cannot be read.
    """
    return sorted((step, path) for step, path in _candidates(root) if not verify(path))


def sealed(root: Path) -> list[tuple[int, Path]]:
    """Every checkpoint in place that was sealed and says what it holds, newest first, without a look at its bytes.

    Raises:
        UserError: The folder cannot be read.
    """
    return [(step, path) for step, path in _sealed(root) if path.name[0] != "." and manifest_of(path)]


def manifest_of(path: Path) -> FolderManifest | None:
    """What a checkpoint says that it holds; None where that cannot be read."""
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=FolderManifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def has_sizes(path: Path, files: Mapping[str, FileEntry] | None = None) -> bool:
    """Whether the files of a checkpoint, or those given, are there and none lacks a byte; nothing is read."""
    manifest = manifest_of(path)
    named = files if files is not None else manifest.files if manifest else None
    try:
        return named is not None and all(
            (path / name).stat().st_size == entry.bytes for name, entry in named.items()
        )
    except OSError:
        return False


def until_whole(found: Sequence[tuple[int, Path]], count: int) -> int:
    """How many of these checkpoints, newest first, it takes until `count` of them are whole by their sizes."""
    for place, (_, path) in enumerate(found):
        if count <= 0:
            return place
        count -= has_sizes(path)
    return len(found)


def entries(path: Path, *patterns: str) -> dict[str, FileEntry]:
    """Size and digest of those files of a checkpoint whose names fit one of the patterns.

    Raises:
        UserError: The checkpoint does not say what it holds.
    """
    manifest = manifest_of(path)
    if manifest is None:
        raise UserError(f"checkpoint {path}: {MANIFEST} cannot be read", "take another one")
    return {
        name: entry
        for name, entry in sorted(manifest.files.items())
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }


def verify(path: Path) -> list[str]:
    """All that is wrong with a checkpoint folder, empty when it is complete and every digest fits."""
    try:
        sealed = (path / MARKER).read_text()
        if digest_file(path / MANIFEST).xxh3_128 != sealed:
            return [f"{MANIFEST} differs from what {MARKER} sealed"]
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=FolderManifest)
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} is missing"]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    if manifest.schema != SCHEMA:
        return [f"has schema {manifest.schema}, this version reads schema {SCHEMA}"]
    if manifest.step != step_of(path):
        return [f"holds step {manifest.step} under the name of another"]
    return [problem for name in manifest.files if (problem := _file_problem(path, name, manifest))]


def prune(root: Path, keep_last: int, keep_every: int = 0, spare: int | None = None) -> list[Path]:
    """Remove old checkpoints and leftovers; returns what was removed.

    Args:
        root: Folder of all checkpoints.
        keep_last: So many of the newest stay whose files are all there, at least 1; damaged ones among them too.
        keep_every: Steps that are a multiple of it stay too; 0 for none.
        spare: A step that stays for now, because somebody reads it.

    Raises:
        UserError: `keep_last` is below 1, or the folder cannot be written.
    """
    if keep_last < 1:
        raise UserError(
            f"learner.checkpoint.keep_last is {keep_last}", "use 1 or more: the newest is needed to resume"
        )
    found = _sealed(root)
    if not found:
        return []
    newest = found[0][0]
    kept = {path for _, path in found[: until_whole(found, keep_last)]}
    kept |= {path for step, path in found if step == spare or (keep_every and step % keep_every == 0)}
    old = [(step, path) for step, path in _candidates(root) if path not in kept and step <= newest]
    try:
        for step, path in old:
            remove(root, path, step)
        for left in root.glob(".step-*.removing"):  # of a process that died while removing
            shutil.rmtree(left)
    except OSError as error:
        raise user_error(root, error) or error from error
    return [path for _, path in old]


def _sealed(root: Path) -> list[tuple[int, Path]]:
    """Also those set aside, of which a crash may have left the only one of its step."""
    return [(step, path) for step, path in _candidates(root) if (path / MARKER).exists()]


def _file_problem(path: Path, name: str, manifest: FolderManifest) -> str:
    expected = manifest.files[name]
    try:
        found = digest_file(path / name)
    except FileNotFoundError:
        return f"{name} is missing"
    if found.bytes != expected.bytes:
        return f"{name} has {found.bytes} bytes, expected {expected.bytes}"
    return "" if found == expected else f"{name} has digest {found.xxh3_128}, expected {expected.xxh3_128}"


def _listed(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"checkpoint folder {root} cannot be read: {error.strerror}", "check its path"
        ) from error


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Newest step first; of one step the one in place before the one it was to replace."""
    named = [(step, path) for path in _listed(root) if (step := step_of(path)) is not None]
    return sorted(named, key=lambda pair: (-pair[0], pair[1].name.startswith(".")))


def _claimed_step(path: Path) -> int:
    match = re.search(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1
