"""Write a checkpoint so that it is either complete and durable, or is not there at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.learner.checkpoint.checkpoint_files import (
    MANIFEST,
    MARKER,
    FileEntry,
    FolderManifest,
    digest_file,
    digest_on_disk,
    files_in,
    folder,
    folders_in,
    fsync_path,
    hidden,
    remove,
    user_error,
    write_durably,
)

log = logging.getLogger("slipstream.checkpoint")
Writer = Callable[[Path], object]
Fault = Callable[[str], None]


def _no_fault(point: str) -> None:
    """Outside tests nothing happens between two steps."""


def write(
    root: Path,
    step: int,
    writers: Mapping[str, Writer],
    fault: Fault = _no_fault,
    confirm: Callable[[], None] = lambda: None,
    read_back: bool = True,
) -> Path:
    """Write the checkpoint of a step and return its folder, once it is durable under its final name.

    Args:
        root: Folder of all checkpoints, made when missing.
        step: The step whose state this is; an earlier checkpoint of the same step is replaced.
        writers: By path inside the checkpoint, what writes that file (or folder of files). One that returns an entry
            says that the file is on disk already, with that size and digest: another process wrote it, or it is
            linked from another checkpoint.
        fault: Called with the name of each point where a crash is worth a test.
        confirm: Called last, before the checkpoint takes its place; what it raises leaves everything as it was.
        read_back: Whether every file is read again before that, and its digest compared.

    Raises:
        UserError: The disk is full, read-only or forbidden.
        SlipstreamError: What was written does not read back as it was; an earlier checkpoint of the step stays.
    """
    for name in writers:
        _check_name(name)
    try:
        return _write(root, step, writers, fault, confirm, read_back)
    except OSError as error:
        if explained := user_error(root, error):
            raise explained from error
        raise


def _write(
    root: Path,
    step: int,
    writers: Mapping[str, Writer],
    fault: Fault,
    confirm: Callable[[], None],
    read_back: bool,
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    # a name of its own: a learner that was replaced, and does not know it yet, may be saving the same step
    work = hidden(root, step, f"{secrets.token_hex(4)}.writing")
    work.mkdir()
    owned = _lock(work)
    try:
        entries = _write_files(work, writers, fault)
        _seal(work, FolderManifest(step, entries), fault)
        if read_back:
            _read_back(work, folder(root, step).name, entries)
        confirm()
    except BaseException as error:
        # explained before the clean-up, while the free space is still what the writer met
        explained = user_error(root, error) if isinstance(error, OSError) else None
        shutil.rmtree(work, ignore_errors=True)
        if explained:
            raise explained from error
        raise
    finally:
        os.close(owned)
    return _put_in_place(root, step, work, fault)


def sweep(root: Path) -> None:
    """Remove what processes left that died while they wrote; the folder of one that lives is locked."""
    for left in root.glob(".step-*.writing"):
        try:
            seen = _lock(left)
        except (BlockingIOError, FileNotFoundError):
            continue
        try:
            shutil.rmtree(left)
        finally:
            os.close(seen)


def _lock(work: Path) -> int:
    """Lock a folder for as long as the file descriptor is open; raises `BlockingIOError` when it is locked."""
    handle = os.open(work, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        log.debug("%s cannot be locked on this file system", work)
    return handle


def _write_files(work: Path, writers: Mapping[str, Writer], fault: Fault) -> dict[str, FileEntry]:
    entries = {}
    for name, writer in writers.items():
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        written = _call(writer, target)
        if isinstance(written, FileEntry):
            entries[name] = _seen(target, written)
        else:
            for path in files_in(target):
                fsync_path(path)
                entries[path.relative_to(work).as_posix()] = digest_file(path)
        fault(f"file {name}")
    return entries


def _read_back(work: Path, name: str, entries: Mapping[str, FileEntry]) -> None:
    """A checkpoint that is counted on must be what was written, also where a disk or a file system is at fault."""
    for file, entry in entries.items():
        if (found := digest_on_disk(work / file)) != entry:
            raise SlipstreamError(
                f"checkpoint {name} does not read back as it was written: {file} has digest {found.xxh3_128}, "
                f"expected {entry.xxh3_128}; its disk or file system is at fault"
            )


def _seen(target: Path, entry: FileEntry) -> FileEntry:
    """The entry of a file that somebody else wrote, once it is seen here."""
    if target.stat().st_size != entry.bytes:
        raise OSError(errno.EIO, f"has {target.stat().st_size} bytes, {entry.bytes} were written", str(target))
    return entry


def _call(writer: Writer, target: Path) -> object:
    """Call a writer; a library in Rust (safetensors) hides the system's error number in its message."""
    try:
        return writer(target)
    except OSError:
        raise
    except Exception as error:
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(match.group(1))
            raise OSError(code, os.strerror(code), str(target)) from error
        raise


def _seal(work: Path, manifest: FolderManifest, fault: Fault) -> None:
    """The manifest, then all names, then the marker: each is on disk before the next is begun."""
    write_durably(work / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    for path in folders_in(work):
        fsync_path(path)
    fault("manifest")
    write_durably(work / MARKER, digest_file(work / MANIFEST).xxh3_128.encode())
    fsync_path(work)
    fault("marker")


def _put_in_place(root: Path, step: int, work: Path, fault: Fault) -> Path:
    final, aside = folder(root, step), hidden(root, step, "replaced")
    if final.exists():  # the step is trained anew after a resume from an earlier one
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        fault("aside")
    os.rename(work, final)
    fsync_path(root)
    fault("renamed")
    if aside.exists():
        remove(root, aside, step)
    return final


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or path.parts[0] in (MANIFEST, MARKER):
        raise ValueError(f"{name!r} cannot name a file of a checkpoint")
