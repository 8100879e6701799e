from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from slipstream.buffer.store import Row, Store, ordered
from slipstream.errors import SlipstreamError, UserError
from slipstream.messages import decode_group


def test_what_was_put_is_there_after_reopening(tmp_path, make_group):
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(5, version=3), make_group(2)])
    store.close()
    again = Store(tmp_path / "b.sqlite")
    assert [(row.ticket, row.oldest, row.tokens) for row in ordered(again.rows, "fifo")] == [
        (5, 3, 4),
        (2, 0, 4),
    ]
    group, arrays = decode_group(again.frames([2]))
    assert group.ticket == 2
    assert arrays.token_ids.tolist() == [0, 1, 2, 3]
    assert again.tokens == 8


def test_arrival_order_goes_on_after_reopening(tmp_path, make_group):
    store = Store(tmp_path / "b.sqlite")
    store.put([make_group(9)])
    store.close()
    again = Store(tmp_path / "b.sqlite")
    again.put([make_group(1)])
    assert [row.ticket for row in ordered(again.rows, "fifo")] == [9, 1]


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
    assert decode_group(store.frames([2]))[0].attempt == 3
    assert len(store) == 2


def test_a_batch_that_fails_stores_nothing_of_it(store, make_group):
    (good, frames), (bad, _) = make_group(1), make_group(2)
    with pytest.raises((TypeError, sqlite3.Error)):
        store.put([(good, frames), (bad, [object()] * 4)])
    assert len(store) == 0
    store.put([(good, frames)])  # and the next transaction is not in its way
    assert store.holds(1, 0)


def test_frames_come_in_the_order_asked_for_and_a_missing_one_is_named(store, make_group):
    store.put([make_group(n) for n in (1, 2, 3)])
    frames = store.frames([3, 1])
    assert [decode_group(frames[start : start + 4])[0].ticket for start in (0, 4)] == [3, 1]
    with pytest.raises(SlipstreamError, match="ticket 8"):
        store.frames([8])


def test_deleting_what_is_not_there_is_harmless(store, make_group):
    store.put([make_group(1)])
    store.delete([1, 7])
    store.delete([1])
    assert len(store) == 0


def test_threads_take_turns(store, make_group):
    """A put in a thread and a delete elsewhere are two transactions on one connection."""
    failures: list[Exception] = []

    def work(first: int) -> None:
        try:
            for ticket in range(first, first + 20):
                store.put([make_group(ticket)])
                store.delete([ticket - 1])
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


ROWS = [Row(1, 0, 5, 1, 3), Row(2, 0, 4, 1, 1), Row(3, 0, 5, 1, 2), Row(4, 0, 3, 1, 4)]


@pytest.mark.parametrize(
    ("order", "tickets"),
    [("fifo", [2, 3, 1, 4]), ("freshest", [3, 1, 2, 4]), ("oldest_first", [4, 2, 3, 1])],
)
def test_orders(order, tickets):
    assert [row.ticket for row in ordered(ROWS, order)] == tickets


def test_random_order_depends_on_seed_and_ticket_alone():
    rows = [Row(n, 0, 0, 1, n) for n in range(20)]
    first = [row.ticket for row in ordered(rows, "random", seed=1)]
    assert first == [row.ticket for row in ordered(reversed(rows), "random", seed=1)]
    assert first != [row.ticket for row in ordered(rows, "random", seed=2)]
    rest = [row for row in rows if row.ticket != first[0]]
    assert [row.ticket for row in ordered(rest, "random", seed=1)] == first[1:]
