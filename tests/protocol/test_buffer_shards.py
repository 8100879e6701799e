from __future__ import annotations

from collections import Counter

import pytest

from slipstream.errors import UserError
from slipstream.protocol.buffer_shards import index_of, peer_of, shard_of


def test_tickets_spread_evenly():
    assert set(Counter(shard_of(ticket, 3) for ticket in range(300)).values()) == {100}


@pytest.mark.parametrize(("name", "index"), [("buffer-0", 0), ("my-release-buffer-12", 12), ("3", 3)])
def test_a_shards_name_ends_in_its_number(name, index):
    assert index_of(name, 16) == index
    assert peer_of(index, 16, ["buffer-7", name]) == name


def test_a_single_shard_may_have_any_name():
    assert index_of("buffer", 1) == index_of("store-9", 1) == 0
    assert peer_of(0, 1, ["whatever"]) == "whatever"


@pytest.mark.parametrize("name", ["buffer", "buffer-2", "buffer0", "buffer-"])
def test_a_name_without_a_shard_is_one_line(name):
    with pytest.raises(UserError, match=r"--name .*2 shards of buffer\.shards.*buffer-0 to buffer-1"):
        index_of(name, 2)


def test_a_shard_that_is_not_there_has_no_peer():
    assert peer_of(1, 2, ["buffer-0", "buffer-11", "buffer"]) is None
