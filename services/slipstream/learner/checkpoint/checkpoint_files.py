"""What a checkpoint folder looks like on disk, and the steps that make it durable.

    <root>/step-00000120/            renamed into place when complete
        model.safetensors, ...       what the writers wrote
        MANIFEST.json                size and xxh3_128 of every file
        COMPLETE                     digest of MANIFEST.json; written last

Hidden names beside it (`.step-00000120.TOKEN.writing`, `.replaced`, `.removing`) are work in progress.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import msgspec
import xxhash

from slipstream.errors import UserError

SCHEMA = 1
MANIFEST = "MANIFEST.json"
MARKER = "COMPLETE"
CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"(?:step-(\d+)|\.step-(\d+)\.replaced)")
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digest of one file."""

    bytes: int
    xxh3_128: str


class FolderManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a checkpoint by their path inside it."""

    step: int
    files: dict[str, FileEntry]
    schema: int = SCHEMA


def folder(root: Path, step: int) -> Path:
    """The complete checkpoint of a step."""
    return root / f"step-{step:08d}"


def hidden(root: Path, step: int, state: str) -> Path:
    """The folder of a step while it is in a passing state: writing, replaced or removing."""
    return root / f".step-{step:08d}.{state}"


def step_of(path: Path) -> int | None:
    """Step of a folder that holds or may hold a checkpoint, None for every other name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1) or match.group(2)) if match else None


def digest_file(path: Path) -> FileEntry:
    """Size and digest of a file, read in chunks."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def digest_on_disk(path: Path) -> FileEntry:
    """As `digest_file`, of what the disk gives back: pages that the system keeps in memory are let go first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return digest_file(path)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_in(path: Path) -> list[Path]:
    """The file itself, or all files below a folder."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def folders_in(path: Path) -> list[Path]:
    """The folder and all folders below it, deepest first."""
    below = sorted((p for p in path.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts))
    return [*below, path]


def remove(root: Path, path: Path, step: int) -> None:
    """Remove a folder so that no half of it is ever taken for a checkpoint."""
    aside = hidden(root, step, "removing")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def user_error(root: Path, error: OSError) -> UserError | None:
    """The one-line error for a place that cannot be written, None for every other fault."""
    if error.errno not in _UNWRITABLE:
        return None
    space = ""
    if root.exists():
        stat = os.statvfs(root)
        space = f" ({stat.f_bavail * stat.f_frsize} bytes free)"
    return UserError(
        f"checkpoint folder {root}{space} cannot be written: {error.strerror or error}",
        "free space, lower learner.checkpoint.keep_last, or set run.root to a writable disk",
    )
