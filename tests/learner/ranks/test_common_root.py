"""What the ranks tell each other about the folder that they share; with real processes in tests/process."""

from __future__ import annotations

import pytest

from slipstream.errors import UserError
from slipstream.learner.ranks import common_root
from slipstream.learner.ranks.common_root import see_common_root


class Place:
    """One of three ranks; the others see the folder, but for those that are `blind`."""

    def __init__(self, rank=0, told=b"", blind=()):
        self.rank, self.size, self.leads = rank, 3, rank == 0
        self.told, self.blind = told, blind

    def share(self, frames):
        self.told = frames[0] if frames else self.told
        return [self.told]

    def add_up(self, values):
        for rank in self.blind:
            values[rank] = 1
        return values


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(common_root, "SEE_SECONDS", 0.1)


def test_what_all_see_is_fine_and_leaves_nothing(tmp_path):
    see_common_root(Place(), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "mark").touch()
    see_common_root(Place(1, str(tmp_path / "mark").encode()), None)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_names_those_that_do_not_see_it(tmp_path, rank):
    """Also those that do see it."""
    mark = tmp_path / "run" / ("mark" if rank == 2 else "")
    place = Place(rank, str(mark / "gone").encode(), blind=(1,))
    if rank == 2:
        mark.mkdir(parents=True)
        (mark / "gone").touch()
    with pytest.raises(UserError, match=r"run.root: of 3 learner ranks 1 do not see .*/run"):
        see_common_root(place, tmp_path / "run" if rank == 0 else None)
    if rank == 0:
        assert list((tmp_path / "run").iterdir()) == []


def test_a_root_that_rank_0_cannot_write_is_refused_on_all(tmp_path):
    (tmp_path / "file").touch()
    place = Place()
    with pytest.raises(UserError, match="rank 0 cannot write"):
        see_common_root(place, tmp_path / "file" / "run")
    assert place.told == b""
    with pytest.raises(UserError, match="rank 0 cannot write"):
        see_common_root(Place(1), None)
