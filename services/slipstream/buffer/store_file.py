"""The file under a store, which others may lock, move, delete or damage, and whose disk may be full.

What passes is waited for, with a line; a file that is gone is written anew from what is open; one that SQLite cannot
read is set aside under another name, and the store begins empty: the ledger has its groups rolled out anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipstream.errors import SlipstreamError, UserError

log = logging.getLogger("slipstream.buffer")
PAGE_BYTES = 32 << 10  # a group is tens of kilobytes: with 4 KiB pages it costs twice the CPU
CHECKPOINT_PAGES = 2048  # 64 MiB: most groups are gone by then, and are never copied from the log into the file
LOCK_SECONDS = 1.0  # that SQLite itself waits
PAUSE_SECONDS = 0.5
LINE_SECONDS = 10.0
PATIENCE_SECONDS = 120.0
_KEPT_ASIDE = 3  # of files that could not be read: a disk that damages each must not fill up with them
_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")

Result = TypeVar("Result")


class StoreFile:
    """One SQLite file, open; used by one thread at a time.

    Args:
        path: The file; made when it is missing.
        sync: Whether a commit is on the disk when it returns.
        prepare: Makes the tables of a new connection.
        emptied: Called when the file was lost, and an empty one is open.

    Raises:
        UserError: It cannot be opened.
        SlipstreamError: Another process has locked it for all the time that it was waited for.
    """

    def __init__(
        self,
        path: Path,
        sync: bool,
        prepare: Callable[[sqlite3.Connection], None],
        emptied: Callable[[], None],
    ) -> None:
        self.path = path
        self._sync = sync
        self._prepare = prepare
        self._emptied = emptied
        self._since = self._told = 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.db = self._patiently(self._open)
        except OSError as error:
            raise UserError(
                f"buffer file {path} cannot be opened: {error}", "check run.root and its disk"
            ) from None

    def do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` makes of the connection; it may be called again, with nothing of the last call written.

        Raises:
            SlipstreamError: The disk or a lock refused for all the time that it was waited for.
        """
        return self._patiently(lambda: self._attempt(work))

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self.db.close()

    def _attempt(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        self._come_back()
        try:
            return work(self.db)
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def _patiently(self, work: Callable[[], Result]) -> Result:
        self._since = self._told = 0.0
        while True:
            try:
                return work()
            except sqlite3.Error as error:
                self._bear(error)

    def _bear(self, error: sqlite3.Error) -> None:
        """Return when it makes sense to try again."""
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(_DAMAGE):
            self._begin_anew(str(error))
        elif name.startswith(_PASSING):
            self._wait(
                error,
                "locked by another process" if "BUSY" in name or "LOCKED" in name else "refused by the disk",
            )
            self._make_room()
        elif hasattr(self, "db"):
            raise SlipstreamError(f"buffer file {self.path} cannot be written: {error}") from error
        else:
            raise UserError(
                f"buffer file {self.path} cannot be opened: {error}", "check run.root and its disk"
            ) from None

    def _wait(self, error: sqlite3.Error, what: str) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > PATIENCE_SECONDS:
            raise SlipstreamError(
                f"buffer file {self.path} was {what} for {PATIENCE_SECONDS:.0f} s: {error}"
            ) from error
        if now - self._told > LINE_SECONDS:
            self._told = now
            log.warning("waiting for buffer file %s, which is %s (%s)", self.path, what, error)
        time.sleep(PAUSE_SECONDS)

    def _make_room(self) -> None:
        """Fold the log into the file and cut it off: deleted groups leave room there, and it may fill the disk."""
        if hasattr(self, "db"):
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._set_up(db)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _set_up(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA page_size={PAGE_BYTES}")  # of a file that is made now
        db.execute("PRAGMA secure_delete=OFF")  # on in some builds: a delete then writes all it frees
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        db.execute(f"PRAGMA synchronous={'FULL' if self._sync else 'NORMAL'}")
        self._prepare(db)
        self._place = _place(self.path)

    def _come_back(self) -> None:
        """Where the file was moved or deleted, write what is open into a new one in its place."""
        if _place(self.path) == self._place:
            return
        log.warning(
            "buffer file %s was moved or deleted while it was open: its groups are written to a new one",
            self.path,
        )
        _set_aside(self.path)
        before = self.db
        try:
            with contextlib.closing(sqlite3.connect(self.path)) as copy:
                before.backup(copy)
            self.db = self._open()
        except sqlite3.Error as error:
            self._begin_anew(str(error))
        before.close()

    def _begin_anew(self, why: str) -> None:
        if hasattr(self, "db"):
            self.db.close()
        aside = _set_aside(self.path)
        log.warning(
            "buffer file %s cannot be read (%s): it is set aside as %s, and its groups are rolled out anew",
            self.path,
            why,
            aside.name,
        )
        self.db = self._open()
        self._emptied()


def _place(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _set_aside(path: Path) -> Path:
    """Rename a file and its log: another file must not meet that log; the newest few stay. Returns the new name."""
    aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
    for ending in ("-shm", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{ending}", f"{aside}{ending}")
    for old in sorted(path.parent.glob(f"{path.name}.aside-{'[0-9]' * 19}"))[:-_KEPT_ASIDE]:
        for ending in ("-shm", "-wal", ""):
            Path(f"{old}{ending}").unlink(missing_ok=True)
    return aside
