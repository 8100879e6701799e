"""The durable store of scored groups: one SQLite file, no network, no clock.

SQLite in WAL mode, because one file gives atomic multi-row writes, survives kill -9 at any instant, can be
read while it is written and needs no server (docs/architecture.md weighs the others). `synchronous=FULL` makes a
put survive a power cut as well: a group is acknowledged only after its commit returned. Which group is in which
state is the ledger's business; the store keeps payloads and what is needed to order them.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slipstream.buffer.store_file import StoreFile
from slipstream.protocol.frames import Frame
from slipstream.protocol.messages import Group
from slipstream.protocol.questions import Stored

log = logging.getLogger("slipstream.buffer")
SCHEMA = 4
_FACTS = "ticket, attempt, prompt_index, oldest, tokens, arrived, informative, reward, size"
_TABLE = """
CREATE TABLE IF NOT EXISTS groups (
    ticket INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, prompt_index INTEGER NOT NULL, oldest INTEGER NOT NULL,
    tokens INTEGER NOT NULL, arrived INTEGER NOT NULL, informative INTEGER NOT NULL, reward REAL NOT NULL,
    size INTEGER NOT NULL, header BLOB NOT NULL, prompt BLOB NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL
)
"""


class Store:
    """Scored groups on disk, keyed by ticket; small facts about each are kept in memory as well.

    Methods may be called from several threads; each call waits for the one before it.

    Args:
        path: The file; made when it is missing.
        sync: Whether a put is on the disk when it returns. Without, it survives the death of the process, but
            the newest ones may be missing after a power cut.
        clock: Microseconds since the epoch; shards on one host thereby share one order of arrival.
    """

    def __init__(
        self, path: Path, sync: bool = True, clock: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._path = path
        self._clock = clock
        self._guard = threading.Lock()
        self._rows: dict[int, Stored] = {}
        self._file = StoreFile(path, sync, self._prepare, self._emptied)
        rows = self._file.do(lambda db: db.execute(f"SELECT {_FACTS} FROM groups").fetchall())
        self._rows = {row[0]: Stored(*row[:6], bool(row[6]), *row[7:]) for row in rows}
        self._newest = max((row.arrived for row in self._rows.values()), default=0)

    def _emptied(self) -> None:
        self._rows = {}

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Another release's table goes: the ledger has its groups rolled out anew, as those of a lost file."""
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema == SCHEMA:
            return  # nothing is written, so that one who still holds the file for writing is not waited for
        if db.execute("SELECT 1 FROM sqlite_master").fetchone():
            log.warning("%s was written by another release: its groups are rolled out anew", self._path)
            db.execute("DROP TABLE IF EXISTS groups")
        db.execute(_TABLE)
        db.execute(f"PRAGMA user_version={SCHEMA}")

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Stored]:
        """Every stored group."""
        return list(self._rows.values())

    @property
    def tokens(self) -> int:
        """Completion tokens stored."""
        return sum(row.tokens for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of the stored groups; the file is somewhat larger."""
        return sum(row.size for row in self.rows)

    def row(self, ticket: int) -> Stored | None:
        """What is stored of a ticket."""
        return self._rows.get(ticket)

    def holds(self, ticket: int, attempt: int) -> bool:
        """Whether this attempt's group is stored."""
        row = self._rows.get(ticket)
        return row is not None and row.attempt == attempt

    def put(self, batch: Sequence[tuple[Group, Sequence[Frame]]]) -> None:
        """Store groups durably in one transaction; of a ticket's attempts the newest stays.

        Raises:
            SlipstreamError: The disk refused; nothing of the batch is stored then.
        """
        with self._guard:
            rows = self._file.do(lambda db: self._write(db, batch))
            self._newest = max([self._newest, *(row.arrived + 1 for row in rows)])
            self._rows.update({row.ticket: row for row in rows})

    def _write(self, db: sqlite3.Connection, batch: Sequence[tuple[Group, Sequence[Frame]]]) -> list[Stored]:
        kept = [each for each in batch if not self._holds_newer(each[0])]
        kept.sort(key=lambda each: each[0].attempt)  # of two in one batch the later statement stays
        first = max(self._newest + 1, self._clock())
        rows = [facts_of(group, frames, first + at) for at, (group, frames) in enumerate(kept)]
        db.execute("BEGIN IMMEDIATE")
        db.executemany(
            f"INSERT OR REPLACE INTO groups VALUES ({', '.join('?' * 13)})",
            [(*_columns(row), *frames) for row, (_, frames) in zip(rows, kept, strict=True)],
        )
        db.execute("COMMIT")
        return rows

    def frames(self, tickets: Iterable[int]) -> tuple[list[int], list[bytes]]:
        """Those of the tickets that are stored, in the order asked for, and the frames of each, four by four."""
        with self._guard:
            rows = self._file.do(lambda db: _select(db, list(tickets)))
        return [ticket for ticket, _ in rows], [frame for _, frames in rows for frame in frames]

    def delete(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Forget groups by (ticket, attempt); those not stored, or stored by another attempt since, are skipped.

        The same one may be named more than once: the learner names a ticket each time that it drops it.
        """
        named = list(attempts)
        with self._guard:
            for ticket in self._file.do(lambda db: self._erase(db, named)):
                self._rows.pop(ticket, None)

    def _erase(self, db: sqlite3.Connection, attempts: Sequence[tuple[int, int]]) -> set[int]:
        gone = {ticket for ticket, attempt in attempts if self.holds(ticket, attempt)}
        db.execute("BEGIN IMMEDIATE")
        db.executemany("DELETE FROM groups WHERE ticket = ?", [(ticket,) for ticket in gone])
        db.execute("COMMIT")
        return gone

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        with self._guard:
            self._file.close()

    def _holds_newer(self, group: Group) -> bool:
        row = self._rows.get(group.ticket)
        return row is not None and row.attempt > group.attempt


def _select(db: sqlite3.Connection, tickets: Sequence[int]) -> list[tuple[int, list[bytes]]]:
    query = "SELECT header, prompt, ids, logprobs FROM groups WHERE ticket = ?"
    rows = [(ticket, db.execute(query, (ticket,)).fetchone()) for ticket in tickets]
    return [(ticket, list(row)) for ticket, row in rows if row is not None]


def facts_of(group: Group, frames: Sequence[Frame], arrived: int) -> Stored:
    """What orders and quotas need to know of a group; `size` counts the bytes of its frames."""
    rewards = group.scored_rewards
    return Stored(
        group.ticket,
        group.attempt,
        group.prompt_index,
        group.oldest_version,
        group.token_count,
        arrived,
        group.informative,
        sum(rewards) / len(rewards) if rewards else 0.0,
        size_of(frames),
    )


def size_of(frames: Sequence[Frame]) -> int:
    """Bytes that a group takes up."""
    return sum(len(frame) for frame in frames)


def _columns(row: Stored) -> tuple[int | float, ...]:
    return (
        row.ticket,
        row.attempt,
        row.prompt_index,
        row.oldest,
        row.tokens,
        row.arrived,
        int(row.informative),
        row.reward,
        row.size,
    )
