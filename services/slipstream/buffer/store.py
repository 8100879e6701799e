"""The durable store of scored groups: one SQLite file, no network, no clock.

SQLite in WAL mode, because one file gives atomic multi-row writes, survives kill -9 at any instant, can be
read while it is written and needs no server. `synchronous=FULL` makes a put survive a power cut as well:
a group is acknowledged only after its commit returned. Which group is in which state is the ledger's business;
the store keeps payloads and what is needed to order them.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import UserError
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
    """Scored groups on disk, keyed by ticket; small facts about each are kept in memory as well."""

    def __init__(self, path: Path) -> None:
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
        return sum(row.tokens for row in self._rows.values())

    def holds(self, ticket: int, attempt: int) -> bool:
        """Whether this attempt's group is stored."""
        row = self._rows.get(ticket)
        return row is not None and row.attempt == attempt

    def put(self, batch: Sequence[tuple[Group, Sequence[Frame]]]) -> None:
        """Store groups durably in one transaction; a newer attempt replaces an older one.

        Raises:
            sqlite3.Error: The disk refused; nothing of the batch is stored then.
        """
        rows = [
            Row(group.ticket, group.attempt, group.oldest_version, group.token_count, self._arrivals + offset)
            for offset, (group, _) in enumerate(batch, start=1)
        ]
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (row.ticket, row.attempt, row.oldest, row.tokens, row.arrived, *map(bytes, frames))
                    for row, (_, frames) in zip(rows, batch, strict=True)
                ],
            )
        self._arrivals += len(rows)
        self._rows.update({row.ticket: row for row in rows})

    def frames(self, tickets: Iterable[int]) -> list[bytes]:
        """The frames of several groups, four each, in the order asked for.

        Raises:
            KeyError: A ticket is not stored.
        """
        found: list[bytes] = []
        for ticket in tickets:
            query = "SELECT header, prompt, ids, logprobs FROM groups WHERE ticket = ?"
            row = self._db.execute(query, (ticket,)).fetchone()
            if row is None:
                raise KeyError(ticket)
            found.extend(row)
        return found

    def delete(self, tickets: Iterable[int]) -> None:
        """Forget groups; those not stored are skipped."""
        gone = [ticket for ticket in tickets if ticket in self._rows]
        with self._transaction():
            self._db.executemany("DELETE FROM groups WHERE ticket = ?", [(ticket,) for ticket in gone])
        for ticket in gone:
            del self._rows[ticket]

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, rolled back on an error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def ordered(rows: Iterable[Row], order: Order, seed: int = 0) -> list[Row]:
    """Rows in the order in which they are to be trained; `random` is repeatable by seed and ticket."""
    if order == "fifo":
        return sorted(rows, key=lambda row: row.arrived)
    if order == "freshest":
        return sorted(rows, key=lambda row: (-row.oldest, row.arrived))
    if order == "oldest_first":
        return sorted(rows, key=lambda row: (row.oldest, row.arrived))
    return sorted(rows, key=lambda row: random.Random(f"{seed}:{row.ticket}").random())
