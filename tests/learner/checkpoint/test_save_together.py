"""A checkpoint that ranks write together, over a store of this process."""

from __future__ import annotations

import threading

import pytest

from slipstream.errors import RunHalted, SlipstreamError, TransportTimeout
from slipstream.learner.checkpoint.finding import verify
from slipstream.learner.checkpoint.save_together import CommonSave, PartSave
from slipstream.learner.checkpoint.writing import write


class Place:
    """A rank, over a dict that all of them share."""

    def __init__(self, rank, told):
        self.rank, self.told = rank, told

    def note(self, key, value):
        self.told[key] = value

    def noted(self, key):
        return self.told.get(key)

    def forget(self, key):
        del self.told[key]


@pytest.fixture
def told():
    return {}


def text(content):
    return lambda path: path.write_text(content)


def save(told, tmp_path, writers, seconds=30.0):
    """Rank 0 writes `a`, rank 1 what its writers do; returns the folder."""
    part = PartSave(Place(1, told), 1, writers)
    common = CommonSave(Place(0, told), 1, seconds)
    try:
        return write(tmp_path, 4, {"a": common.own(text("0")), "b": common.of(1), "c": common.of(1)})
    finally:
        part.drop(30.0)


def test_every_ranks_files_are_sealed_in_one_folder(told, tmp_path):
    folder = save(told, tmp_path, {"b": text("1"), "c": text("22")})
    assert verify(folder) == []
    assert {p.name: p.read_text() for p in folder.iterdir() if len(p.name) == 1} == {
        "a": "0",
        "b": "1",
        "c": "22",
    }
    assert list(told) == ["save/1"]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RunHalted("tensor w is not finite"), RunHalted, "tensor w"),
        (OSError(28, "No space left"), SlipstreamError, "rank 1 could not write.*No space"),
    ],
)
def test_what_goes_wrong_on_a_rank_ends_the_save_with_its_cause(told, tmp_path, error, raised, words):
    def broken(path):
        raise error

    with pytest.raises(raised, match=words):
        save(told, tmp_path, {"b": broken})
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_answer_is_named_after_the_deadline(told, tmp_path):
    common = CommonSave(Place(0, told), 1, 0.0)
    with pytest.raises(TransportTimeout, match="rank 2 has not written"):
        write(tmp_path, 4, {"b": common.of(2)})
    assert not list(tmp_path.iterdir())


def test_a_save_that_nobody_asks_for_is_given_up(told):
    wrote = threading.Event()
    part = PartSave(Place(1, told), 1, {"b": lambda path: wrote.set()})
    part.drop(30.0)
    told["save/1"] = b"/"
    assert not part._thread.is_alive()
    assert not wrote.is_set()
