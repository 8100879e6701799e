"""The durable store of scored groups: one SQLite file, no network, no clock.

SQLite in WAL mode, because one file gives atomic multi-row writes, survives kill -9 at any instant, can be
read while it is written and needs no server. `synchronous=FULL` makes a put survive a power cut as well:
a group is acknowledged only after its commit returned. Which group is in which state is the ledger's business;
the store keeps payloads and what is needed to order them.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import SlipstreamError, UserError
from slipstream.messages import Frame, Group

Order = Literal["fifo", "freshest", "oldest_first", "random"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    ticket INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, oldest INTEGER NOT NULL, tokens INTEGER NOT NULL,
    arrived INTEGER NOT NULL, header BLOB NOT NULL, prompt BLOB NOT NULL, ids BLOB NOT NULL,
    logprobs BLOB NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What ordering and eviction need to know of a stored group."""

    ticket: int
    attempt: int
    oldest: int
    tokens: int
    arrived: int


class Store:
    """Scored groups on disk, keyed by ticket; small facts about each are kept in memory as well.

    Methods may be called from several threads; each call waits for the one before it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            problem = f"buffer file {path} cannot be opened: {error}"
            raise UserError(problem, "check run.root and its disk") from None
        columns = "ticket, attempt, oldest, tokens, arrived"
        self._rows = {row[0]: Row(*row) for row in self._db.execute(f"SELECT {columns} FROM groups")}
        self._arrivals = max((row.arrived for row in self._rows.values()), default=0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        """Every stored group."""
        return list(self._rows.values())

    @property
    def tokens(self) -> int:
        """Completion tokens stored."""
        return sum(row.tokens for row in self.rows)

    def holds(self, ticket: int, attempt: int) -> bool:
        """Whether this attempt's group is stored."""
        row = self._rows.get(ticket)
        return row is not None and row.attempt == attempt

    def put(self, batch: Sequence[tuple[Group, Sequence[Frame]]]) -> None:
        """Store groups durably in one transaction; of a ticket's attempts the newest stays.

        Raises:
            SlipstreamError: The disk refused; nothing of the batch is stored then.
        """
        with self._transaction():
            kept = [each for each in batch if not self._holds_newer(each[0])]
            kept.sort(key=lambda each: each[0].attempt)  # of two in one batch the later statement stays
            rows = [
                Row(
                    group.ticket,
                    group.attempt,
                    group.oldest_version,
                    group.token_count,
                    self._arrivals + offset,
                )
                for offset, (group, _) in enumerate(kept, start=1)
            ]
            self._db.executemany(
                "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (row.ticket, row.attempt, row.oldest, row.tokens, row.arrived, *map(bytes, frames))
                    for row, (_, frames) in zip(rows, kept, strict=True)
                ],
            )
            self._db.execute("COMMIT")
            self._arrivals += len(rows)
            self._rows.update({row.ticket: row for row in rows})

    def frames(self, tickets: Iterable[int]) -> list[bytes]:
        """The frames of several groups, four each, in the order asked for.

        Raises:
            SlipstreamError: A ticket is not stored.
        """
        found: list[bytes] = []
        with self._guard:
            for ticket in tickets:
                query = "SELECT header, prompt, ids, logprobs FROM groups WHERE ticket = ?"
                row = self._db.execute(query, (ticket,)).fetchone()
                if row is None:
                    raise SlipstreamError(f"ticket {ticket} is not in {self._path}: was the file replaced?")
                found.extend(row)
        return found

    def delete(self, tickets: Iterable[int]) -> None:
        """Forget groups; those not stored are skipped."""
        with self._transaction():
            gone = [ticket for ticket in tickets if ticket in self._rows]
            self._db.executemany("DELETE FROM groups WHERE ticket = ?", [(ticket,) for ticket in gone])
            self._db.execute("COMMIT")
            for ticket in gone:
                del self._rows[ticket]

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        with self._guard:
            self._db.close()

    def _holds_newer(self, group: Group) -> bool:
        row = self._rows.get(group.ticket)
        return row is not None and row.attempt > group.attempt

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE; whoever enters commits, and what is not committed is rolled back."""
        with self._guard:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
            except sqlite3.Error as error:
                raise SlipstreamError(f"buffer file {self._path} cannot be written: {error}") from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def ordered(rows: Iterable[Row], order: Order, seed: int = 0) -> list[Row]:
    """Rows in the order in which they are to be trained; `random` is repeatable by seed and ticket."""
    if order == "fifo":
        return sorted(rows, key=lambda row: row.arrived)
    if order == "freshest":
        return sorted(rows, key=lambda row: (-row.oldest, row.arrived))
    if order == "oldest_first":
        return sorted(rows, key=lambda row: (row.oldest, row.arrived))
    return sorted(rows, key=lambda row: random.Random(f"{seed}:{row.ticket}").random())
