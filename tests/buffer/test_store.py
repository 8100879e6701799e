from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from slipstream.buffer.store import Store
from slipstream.errors import UserError
from slipstream.messages import decode_group


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
