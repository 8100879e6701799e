"""Files of shared memory, and how nothing of a dead process stays behind.

Names are `slipstream-<run>-<incarnation>-<version>`, with `.part` while they are written and `-spare<n>.part`
while they wait for a version. Two kinds of flock keep order, both given up by the kernel when a process dies:

- The publisher holds `slipstream-<run>-<incarnation>.lock` for as long as it lives. Whoever starts next removes
  the files of every publisher whose lock is free.
  The lock file may list more files, which others have made for that process and which go the same way.
- A reader holds a shared lock on the file it has mapped. The publisher writes into old pages only under the
  exclusive lock, so it can use pages again (fresh ones cost eight times the copy, in page faults) and yet never
  change bytes that someone reads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from slipstream.errors import UserError
from slipstream.weights.base import Bytes

SHM = Path("/dev/shm")
PREFIX = "slipstream-"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOTE = re.compile(r"^(\d+) ([A-Za-z0-9][A-Za-z0-9._-]*)$", re.MULTILINE)


def prefix_of(run: str, incarnation: int) -> str:
    """Common start of all file names of one publisher.

    Raises:
        UserError: A run name that cannot be part of a file name.
    """
    if not _RUN.fullmatch(run):
        raise UserError(f"run name {run!r} cannot name files", "use letters, digits, dots, dashes, underscores")
    return f"{PREFIX}{run}-{incarnation}"


def free_bytes(directory: Path) -> int:
    """Bytes that can still be stored in the directory's file system."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def check_space(directory: Path, needed: int) -> None:
    """Refuse to start what would fill the shared memory.

    Raises:
        UserError: Names the directory, the bytes needed and free, and the mend.
    """
    if (free := free_bytes(directory)) < needed:
        raise _full(directory, needed, free)


def _full(directory: Path, needed: int, free: int) -> UserError:
    return UserError(
        f"{directory} has {free} bytes free, the weights need {needed}",
        "enlarge it (docker: --shm-size or shm_size; Kubernetes: an emptyDir with medium Memory), "
        "or remove files that other programs left there",
    )


def _unwritable(directory: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return _full(directory, 1, free_bytes(directory))
    return UserError(
        f"no shared memory for weights: {directory} cannot be written ({error.strerror})",
        "mount a writable tmpfs there (docker: --shm-size or shm_size; Kubernetes: an emptyDir with medium Memory)",
    )


def try_lock(fd: int, kind: int) -> bool:
    """Take a flock of `kind` (LOCK_EX or LOCK_SH) without waiting; says whether it was free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


class HeldError(UserError):
    """Another process that lives holds the lock."""


class PublisherLock:
    """Says "this publisher lives" to whoever starts next; freed by the kernel when the process dies.

    Raises:
        HeldError: Another process holds it.
        UserError: The directory is not there or cannot be written.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._path = directory / f"{prefix}.lock"
        while True:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _unwritable(directory, error) from error
            if not try_lock(self._fd, fcntl.LOCK_EX):
                os.close(self._fd)
                raise HeldError(
                    f"{self._path} is held: a learner of this run and incarnation is alive",
                    "stop it, or start this run under another name",
                )
            if same_file(self._fd, self._path):  # else a sweep removed it between open and lock
                return
            os.close(self._fd)

    def note(self, names: Iterable[str]) -> None:
        """List files of the directory that shall not outlive this lock; each by its inode too, for a name may be
        given to another's file later.

        Raises:
            UserError: The list cannot be written.
        """
        directory, lines = self._path.parent, []
        for name in names:
            with suppress(FileNotFoundError):
                lines.append(f"{(directory / name).stat().st_ino} {name}\n")
        try:
            os.pwrite(self._fd, "".join(lines).encode(), 0)
            os.truncate(self._fd, sum(map(len, lines)))
        except OSError as error:
            raise _unwritable(directory, error) from error

    def noted(self) -> list[str]:
        """The listed files that are still the ones that were meant; none when closed."""
        return _noted(self._path.parent, self._fd) if self._fd >= 0 else []

    def close(self) -> None:
        """Remove the lock file and free the lock; harmless when repeated."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one with that name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def sweep(directory: Path) -> list[str]:
    """Remove the files of publishers that died; returns the names removed. Readers keep what they mapped.

    Only this user's: whoever may write here could else put a lock there that lists our files.
    """
    removed = []
    for lock in sorted(directory.glob(f"{PREFIX}*.lock")):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # just removed, another user's, or no lock at all
            continue
        try:
            own = os.fstat(fd).st_uid == os.geteuid()
            if own and try_lock(fd, fcntl.LOCK_EX) and same_file(fd, lock):
                removed += _remove_all(directory, lock, fd)
        finally:
            os.close(fd)
    return removed


def _remove_all(directory: Path, lock: Path, fd: int) -> list[str]:
    own = re.compile(re.escape(lock.stem) + r"-(\d+|spare\d+)(\.part)?")
    names = sorted(path.name for path in directory.iterdir() if own.fullmatch(path.name))
    names += _noted(directory, fd)
    for name in [*names, lock.name]:  # the lock last, so that an interrupted sweep can be repeated
        (directory / name).unlink(missing_ok=True)
    return names


def _noted(directory: Path, fd: int) -> list[str]:
    """Files that an open lock file lists and that are still the ones that were meant."""
    found = []
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode("ascii", "replace")
    for inode, name in _NOTE.findall(text):
        with suppress(FileNotFoundError):
            if (directory / name).stat().st_ino == int(inode):
                found.append(name)
    return found


class Segment:
    """The publisher's writable mapping of one file; created locked for writing, with all its memory reserved.

    Reserving at once turns a full file system into an error here, instead of a SIGBUS at some later write.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.first_name = path, path.name
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.posix_fallocate(self._fd, 0, nbytes)
            self._map = mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self._fd)
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise _full(path.parent, nbytes, free_bytes(path.parent)) from error
            raise
        self.data: Bytes = np.frombuffer(self._map, np.uint8)

    def rename(self, name: str) -> None:
        """Give the file another name in its directory, atomically."""
        target = self.path.with_name(name)
        self.path.rename(target)
        self.path = target

    def open_for_readers(self, name: str) -> None:
        """End writing: readers may lock and map the file under its new name."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.rename(name)

    def reclaim(self) -> bool:
        """Lock for writing again; False while someone still reads."""
        return try_lock(self._fd, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the name and this mapping; readers keep theirs, and the memory until they end."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        del self.data
        unmap(self._map)


def unmap(mapping: mmap.mmap) -> None:
    """Close a mapping now, or leave it to the last array that still looks at it."""
    try:
        mapping.close()
    except BufferError:
        return
