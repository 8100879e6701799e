from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from slipstream.buffer import store_file
from slipstream.buffer.store import Store
from slipstream.errors import SlipstreamError, UserError
from slipstream.protocol.messages import decode_group


def by_arrival(store):
    return sorted(store.rows, key=lambda row: row.arrived)


def test_what_was_put_is_there_after_reopening(tmp_path, make_group):
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(5, version=3), make_group(2)])
    store.close()
    again = Store(tmp_path / "b.sqlite")
    assert [(row.ticket, row.oldest, row.tokens) for row in by_arrival(again)] == [
        (5, 3, 4),
        (2, 0, 4),
    ]
    group, arrays = decode_group(again.frames([2])[1])
    assert group.ticket == 2
    assert arrays.token_ids.tolist() == [0, 1, 2, 3]
    assert again.tokens == 8


def test_a_file_that_a_replaced_buffer_still_writes_to_can_be_opened(tmp_path, make_group):
    """It may have been stopped in the middle of a transaction, and holds the lock for as long as it lives."""
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(5)])
    with contextlib.closing(sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        again = Store(tmp_path / "b.sqlite")
        assert [row.ticket for row in again.rows] == [5]
        again.close()
    store.close()


def test_arrival_order_goes_on_after_reopening(tmp_path, make_group):
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(9)])
    store.close()
    again = Store(tmp_path / "b.sqlite")
    again.put([make_group(1)])
    assert [row.ticket for row in by_arrival(again)] == [9, 1]


def test_arrivals_are_in_order_whatever_the_clock_does(tmp_path, make_group):
    """Shards on one host share the clock; one that goes back, or stands still, puts nobody in front."""
    now = 1000
    store = Store(tmp_path / "b.sqlite", clock=lambda: now)
    store.put([make_group(5), make_group(4)])
    now = 10
    store.put([make_group(3)])
    assert [row.ticket for row in by_arrival(store)] == [5, 4, 3]
    assert [row.arrived for row in by_arrival(store)] == sorted({row.arrived for row in store.rows})


def test_the_table_of_another_release_goes(tmp_path, make_group):
    path = tmp_path / "b.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE groups (ticket INTEGER PRIMARY KEY, attempt INTEGER)")
        db.execute("INSERT INTO groups VALUES (1, 0)")
        db.commit()
    store = Store(path)
    assert len(store) == 0
    store.put([make_group(1)])
    assert Store(path).holds(1, 0)


def test_without_sync_a_killed_process_loses_nothing(tmp_path, make_group):
    store = Store(tmp_path / "b.sqlite", sync=False)
    store.put([make_group(1)])
    assert Store(tmp_path / "b.sqlite").holds(1, 0)


def test_bytes_count_the_frames(store, make_group):
    made = make_group(1)
    store.put([made])
    assert store.bytes == sum(map(len, made[1]))


def test_a_connection_that_never_closed_loses_nothing(tmp_path, make_group):
    """As a kill -9 leaves it: the file is read by another process while the first has not closed it."""
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(1)])
    assert [row.ticket for row in Store(tmp_path / "b.sqlite").rows] == [1]


def test_of_several_attempts_the_newest_stays_whatever_the_order(store, make_group):
    store.put([make_group(1, attempt=1)])
    store.put([make_group(1, attempt=0)])
    assert store.holds(1, 1)
    store.put([make_group(2, attempt=3), make_group(2, attempt=2)])
    assert store.holds(2, 3)
    assert decode_group(store.frames([2])[1])[0].attempt == 3
    assert len(store) == 2


def test_a_batch_that_fails_stores_nothing_of_it(store, make_group):
    (good, frames), (bad, _) = make_group(1), make_group(2)
    with pytest.raises((TypeError, sqlite3.Error)):
        store.put([(good, frames), (bad, [object()] * 4)])
    assert len(store) == 0
    store.put([(good, frames)])  # and the next transaction is not in its way
    assert store.holds(1, 0)


def test_frames_come_in_the_order_asked_for_and_a_missing_one_is_left_out(store, make_group):
    store.put([make_group(n) for n in (1, 2, 3)])
    here, frames = store.frames([3, 8, 1])
    assert here == [3, 1]
    assert [decode_group(frames[start : start + 4])[0].ticket for start in (0, 4)] == [3, 1]


def test_deleting_what_is_not_there_is_harmless(store, make_group):
    store.put([make_group(1)])
    store.delete([(1, 0), (7, 0), (1, 0)])
    store.delete([(1, 0)])
    assert len(store) == 0


def test_a_late_delete_leaves_the_next_attempt(store, make_group):
    """Promise 2: between the look and the delete the ticket may have been rolled out and stored anew."""
    store.put([make_group(1, attempt=0)])
    store.put([make_group(1, attempt=1)])
    store.delete([(1, 0)])
    assert store.holds(1, 1)
    assert store.frames([1])[0] == [1]


def test_threads_take_turns(store, make_group):
    """A put in a thread and a delete elsewhere are two transactions on one connection."""
    failures: list[Exception] = []

    def work(first: int) -> None:
        try:
            for ticket in range(first, first + 20):
                store.put([make_group(ticket)])
                store.delete([(ticket - 1, 0)])
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(row.ticket for row in store.rows) == [119, 219, 319]


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path: Path):
    (tmp_path / "b.sqlite").mkdir()
    with pytest.raises(UserError, match=r"b\.sqlite.*run\.root"):
        Store(tmp_path / "b.sqlite")


@pytest.fixture
def hasty(monkeypatch):
    """Waits as always, only shorter."""
    for name, seconds in (("LOCK_SECONDS", 0.05), ("PAUSE_SECONDS", 0.01), ("LINE_SECONDS", 0.2)):
        monkeypatch.setattr(store_file, name, seconds)


def test_a_locked_file_is_waited_for_and_named(tmp_path, make_group, hasty, caplog):
    store = Store(tmp_path / "b.sqlite")
    other = sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(1.0, lambda: (other.execute("ROLLBACK"), other.close())).start()
    started = time.monotonic()
    store.put([make_group(5)])
    assert time.monotonic() - started > 0.9
    assert store.holds(5, 0)
    assert "waiting for buffer file" in caplog.text
    assert "locked by another process" in caplog.text


def test_a_file_that_stays_locked_is_given_up_with_its_cause(tmp_path, make_group, hasty, monkeypatch):
    monkeypatch.setattr(store_file, "PATIENCE_SECONDS", 0.2)
    store = Store(tmp_path / "b.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SlipstreamError, match="was locked by another process for"):
            store.put([make_group(5)])


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced"])
def test_a_file_that_is_gone_under_its_buffer_is_written_anew(tmp_path, make_group, caplog, how):
    path = tmp_path / "b.sqlite"
    store = Store(path)
    store.put([make_group(1), make_group(2)])
    store.delete([(2, 0)])
    if how == "renamed":
        path.rename(tmp_path / "c.sqlite")
    else:
        path.unlink()
    if how == "replaced":
        path.write_text("another file")
    store.put([make_group(3)])
    assert "was moved or deleted while it was open" in caplog.text
    assert store.frames([1, 2, 3])[0] == [1, 3]
    store.close()
    assert sorted(row.ticket for row in Store(path).rows) == [1, 3]


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_file_that_is_no_database_is_set_aside_and_counts_as_lost(tmp_path, make_group, caplog, content):
    path = tmp_path / "b.sqlite"
    path.write_bytes(content)
    store = Store(path)
    assert len(store) == 0
    store.put([make_group(5)])
    (aside,) = tmp_path.glob("b.sqlite.aside-*")
    assert aside.read_bytes() == content
    assert f"it is set aside as {aside.name}, and its groups are rolled out anew" in caplog.text


def test_of_the_files_set_aside_the_newest_three_stay(tmp_path, make_group):
    path = tmp_path / "b.sqlite"
    for number in range(5):
        path.write_bytes(b"no database %d" % number * 100)
        (tmp_path / "b.sqlite-wal").unlink(missing_ok=True)  # from which SQLite would mend the file
        Store(path).close()
    kept = sorted(tmp_path.glob("b.sqlite.aside-*[0-9]"))
    assert [file.read_bytes()[12:13] for file in kept] == [b"2", b"3", b"4"]


def test_a_file_that_becomes_unreadable_while_it_is_open_counts_as_lost(tmp_path, make_group, caplog):
    path = tmp_path / "b.sqlite"
    store = Store(path)
    store.put([make_group(ticket) for ticket in range(50)])
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.write(b"\xee" * size)
    store.put([make_group(77)])
    assert [row.ticket for row in store.rows] == [77]
    assert "its groups are rolled out anew" in caplog.text


def test_a_full_disk_is_waited_for_and_the_log_is_folded_away(tmp_path, make_group, hasty, caplog):
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(1)])
    limit = store._file.db.execute("PRAGMA page_count").fetchone()[0]
    store._file.db.execute(f"PRAGMA max_page_count={limit}")  # what SQLite says of a disk without room
    store._file.db.execute("PRAGMA cache_size=1")
    big = [make_group(ticket) for ticket in range(2, 400)]
    threading.Timer(0.6, lambda: store._file.db.execute("PRAGMA max_page_count=100000")).start()
    store.put(big)
    assert len(store) == 399
    assert "refused by the disk" in caplog.text
