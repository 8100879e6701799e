"""Reading the book as a whole: counts, conservation, audit, snapshot and restore."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.counts import Audit, Book, Conservation, Counts, compare
from slipstream.ledger.records import RunState, pairs
from slipstream.ledger.runs import StateReply

SNAPSHOT_SCHEMA = 2  # 1 could hold tickets that were issued ahead of their turn
AUDIT_BATCH = 512
AUDIT_TRIES = 5
AT_ONCE = 1 << 30


class Snapshot(msgspec.Struct, frozen=True):
    """The whole book but for members and evaluations, as it goes into a checkpoint."""

    schema: int
    run: dict[str, str]
    records: list[dict[str, str]]
    folded: dict[str, str]
    bitmaps: dict[str, bytes]
    lost: list[str]
    discarded: int


class _CountsReply(msgspec.Struct, frozen=True, array_like=True):
    issued: int
    counters: list[str]


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """The records after the last batch, and the book right then.

    Of each record: label, tokens, uses, bytes in a buffer, bytes handed over.
    """

    changes: int
    last: int
    found: list[tuple[str, int, int, int, int]]
    book: Book


class _SnapshotReply(msgspec.Struct, frozen=True, array_like=True):
    run: list[str]
    records: list[list[str]]
    folded: list[str]
    labels: list[str]
    lost: list[str]
    discarded: int


class BookCalls(LedgerCalls):
    """Calls that read or write the whole book."""

    async def counts(self) -> Counts:
        """Groups and tokens by state and reason, from the counters."""
        reply = await self._book.call(_CountsReply, "counts")
        return Counts.read(reply.issued, pairs(reply.counters))

    async def conservation(self) -> Conservation:
        """The conservation equation from the counters alone."""
        return (await self.counts()).conservation()

    async def audit(self) -> Audit:
        """Count the records themselves and compare with the counters, in batches and without stopping the run.

        The scan is valid when nothing changed meanwhile; on a run that never rests, one call counts it all.
        """
        for _ in range(AUDIT_TRIES):
            book, scanned = await self._scan(AUDIT_BATCH)
            if book is not None:
                return compare(book, scanned)
        book, scanned = await self._scan(AT_ONCE)
        assert book is not None
        return compare(book, scanned)

    async def _scan(self, limit: int) -> tuple[Book | None, Counter[str]]:
        """Sums over all records, or None when the book changed between the first and the last batch."""
        scanned: Counter[str] = Counter()
        after, first = -1, -1
        while True:
            batch = await self._book.call(_Batch, "scan", after, limit)
            after, first = batch.last, batch.changes if first < 0 else first
            if batch.changes != first:
                return None, scanned
            for label, tokens, uses, size, partial in batch.found:
                scanned["groups:" + label] += 1
                scanned["tokens:" + label] += tokens
                scanned["uses"] += uses
                scanned["bytes"] += size
                scanned["partial_bytes"] += partial
                scanned["partials"] += partial > 0
            if len(batch.found) < limit:
                return batch.book, scanned

    async def memory(self) -> tuple[int, int]:
        """Bytes that the ledger's server uses, and the most it may (0: no limit)."""
        return await self._book.memory()

    async def snapshot(self) -> bytes:
        """The book as bytes for a checkpoint: cursor, version, step, open tickets, what was trained."""
        reply, bitmaps = await self._book.call_with_blobs(_SnapshotReply, "snapshot")
        packed = [zlib.compress(bitmap, 1) for bitmap in bitmaps]
        snapshot = Snapshot(
            schema=SNAPSHOT_SCHEMA,
            run=pairs(reply.run),
            records=[pairs(flat) for flat in reply.records],
            folded=pairs(reply.folded),
            bitmaps=dict(zip(reply.labels, packed, strict=True)),
            lost=reply.lost,
            discarded=reply.discarded,
        )
        return msgspec.msgpack.encode(snapshot)

    async def restore(self, snapshot: bytes, back: str = "") -> RunState:
        """Fill an empty ledger, or one older than the snapshot; open the run afterwards as usual.

        Stored groups stay with their buffers; what was on its way is issued again.

        Args:
            snapshot: As `snapshot` made it.
            back: Names the consent by which a newer book is given up for this one; each counts once.

        Raises:
            LedgerError: The ledger is as new as the snapshot, or newer, and nobody consents to give it up.
            msgspec.DecodeError: Not a snapshot.
        """
        book = msgspec.msgpack.decode(snapshot, type=Snapshot)
        if book.schema != SNAPSHOT_SCHEMA:
            raise msgspec.ValidationError(
                f"snapshot schema {book.schema}, this process reads {SNAPSHOT_SCHEMA}"
            )
        digest = hashlib.sha256(snapshot).hexdigest() + back
        blobs = tuple(zlib.decompress(bitmap) for bitmap in book.bitmaps.values())
        reply = await self._book.call(
            StateReply,
            "restore",
            digest,
            int(bool(back)),
            book.run,
            book.records,
            book.folded,
            list(book.bitmaps),
            book.lost,
            book.discarded,
            blobs=blobs,
        )
        return reply.read()
