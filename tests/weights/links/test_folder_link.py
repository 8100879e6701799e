"""Weights through a folder: whole or not at all, kept while a replica wants them, removed by one learner."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.errors import UserError, WeightsError
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.folder_link import FilePuller, FileStore
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf


@pytest.fixture
def learner(tmp_path, plain_layout):
    """A publisher, by its incarnation, into one folder."""
    made = []

    def start(incarnation=1):
        near = tmp_path / "near"
        near.mkdir(exist_ok=True)
        store = FileStore(str(tmp_path / "store"), "run", incarnation)
        shm = ShmPublisher("run", incarnation, plain_layout, directory=near)
        made.append(ServingPublisher(shm, Shelf(near), stores=[store]))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def replica(tmp_path):
    (tmp_path / "far").mkdir()
    made = PullSubscriber([FilePuller()], directory=tmp_path / "far")
    yield made
    made.close()


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "store" / "run").iterdir())


def test_a_version_comes_whole_through_the_folder(learner, replica, model):
    weights = replica.fetch(learner().publish(1, model(3.0)))
    for index, array in enumerate(weights.tensors.values()):
        np.testing.assert_array_equal(array, np.full((4, 1024), 30.0 + index, np.float32))


def test_versions_stay_until_every_replica_is_past_them_and_a_slow_one_gets_the_newest(
    learner, replica, model, tmp_path
):
    """Case 74."""
    publisher = learner()
    manifests = [publisher.publish(version, model(float(version))) for version in range(1, 5)]
    publisher.retire(2)
    assert folders(tmp_path) == ["1-2", "1-3", "1-4"]
    assert replica.fetch(manifests[1]).version == 2  # the slow one still reads the one it wants
    publisher.retire(99)
    assert folders(tmp_path) == ["1-4"]
    with pytest.raises(WeightsError, match=r"version 3 is gone from .*; fetch the newest one"):
        replica.fetch(manifests[2])
    assert replica.fetch(manifests[3]).version == 4


def test_what_an_earlier_learner_left_goes_when_all_are_past_it(learner, replica, model, tmp_path):
    first = learner(1)
    old = first.publish(1, model(1.0))
    second = learner(2)
    second.publish(2, model(2.0))
    second.retire(1)
    assert folders(tmp_path) == ["1-1", "2-2"]
    assert replica.fetch(old).version == 1
    second.retire(2)
    assert folders(tmp_path) == ["2-2"]


@pytest.mark.parametrize("harm", ["marker", "byte", "short"])
def test_half_a_version_is_refused(harm, learner, replica, model, tmp_path):
    manifest = learner().publish(1, model(1.0))
    folder = tmp_path / "store" / "run" / "1-1"
    data = bytearray((folder / "dense").read_bytes())
    if harm == "marker":
        (folder / "complete").unlink()
    elif harm == "byte":
        data[70000] ^= 1
        (folder / "dense").write_bytes(data)
    else:
        (folder / "dense").write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=r"gone from|bucket 8 of 12|shorter than its version"):
        replica.fetch(manifest)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(UserError, match=r"weights.folder .* cannot be written"):
        FileStore(str(tmp_path / "store"), "run", 1)


def test_a_store_in_memory_serves_as_well(plain_layout, model, tmp_path, replica):
    """Any file system that fsspec knows, here one without folders of its own."""
    (tmp_path / "near").mkdir()
    store = FileStore("memory://weights", "run", 1)
    shm = ShmPublisher("run", 1, plain_layout, directory=tmp_path / "near")
    publisher = ServingPublisher(shm, Shelf(tmp_path / "near"), stores=[store])
    assert replica.fetch(publisher.publish(1, model(1.0))).version == 1
    publisher.close()
    assert store._system.find("/weights") == []
