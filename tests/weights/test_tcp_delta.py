"""Deltas between hosts: taken when the base is there, and never trusted over the digests."""

import numpy as np
import pytest

from slipstream.weights.base import ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links import pulling
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.manifest import layout


class Learner:
    """A bfloat16 tensor of which each step changes 1 %, published with deltas."""

    def __init__(self, directory, dense_every=25):
        self.random = np.random.default_rng(0)
        self.bits = self.random.integers(0, 1 << 16, (500, 80), np.uint16)
        self.version = 0
        plan = layout({"w": self.source}, {"head": "w"}, bucket_bytes=8192)
        shm = ShmPublisher("delta", 1, plan, directory=directory)
        shelf = Shelf(directory)
        self.publisher = ServingPublisher(shm, shelf, [StreamServer(shelf)], dense_every=dense_every)

    @property
    def source(self):
        return ArraySource(self.bits, "bfloat16")

    def step(self, share=0.01):
        self.version += 1
        self.bits[self.random.random(self.bits.shape) < share] += 1
        return self.publisher.publish(self.version, {"w": self.source})


@pytest.fixture
def learner(tmp_path):
    (tmp_path / "near").mkdir()
    made = Learner(tmp_path / "near")
    yield made
    made.publisher.close()


@pytest.fixture
def replica(tmp_path):
    (tmp_path / "far").mkdir()
    made = PullSubscriber([TcpPuller()], directory=tmp_path / "far")
    yield made
    made.close()


def test_versions_in_a_row_travel_as_deltas_and_are_bit_for_bit_the_dense_ones(learner, replica):
    for _ in range(6):
        manifest = learner.step()
        weights = replica.fetch(manifest)
        np.testing.assert_array_equal(weights.tensors["w"], learner.bits)
        weights.release()
        learner.publisher.retire(learner.version)
    assert (replica.deltas_applied, replica.deltas_failed) == (5, 0)
    assert manifest.delta.nbytes < 0.04 * manifest.layout.total_bytes
    assert learner.publisher.density == pytest.approx(0.01, rel=0.3)


def test_who_missed_a_version_or_just_joined_gets_it_dense(learner, replica):
    replica.fetch(learner.step())
    learner.step()
    weights = replica.fetch(learner.step())
    np.testing.assert_array_equal(weights.tensors["w"], learner.bits)
    assert replica.deltas_applied == 0
    replica.fetch(learner.step())
    assert replica.deltas_applied == 1


def test_a_delta_that_leads_elsewhere_is_counted_and_the_version_comes_dense(learner, replica, monkeypatch):
    replica.fetch(learner.step())

    def wrong(data, blob, plan):
        data[0] ^= 1

    monkeypatch.setattr(pulling, "apply", wrong)
    weights = replica.fetch(learner.step())
    np.testing.assert_array_equal(weights.tensors["w"], learner.bits)
    assert (replica.deltas_applied, replica.deltas_failed) == (0, 1)


def test_a_version_of_which_most_changed_offers_no_delta(learner, replica):
    replica.fetch(learner.step())
    manifest = learner.step(share=1.0)
    assert manifest.delta is None
    assert learner.publisher.density == 1.0
    np.testing.assert_array_equal(replica.fetch(manifest).tensors["w"], learner.bits)


def test_an_unchanged_version_is_a_delta_of_a_few_bytes(learner, replica):
    replica.fetch(learner.step())
    manifest = learner.step(share=0.0)
    assert manifest.delta.nbytes < 100
    np.testing.assert_array_equal(replica.fetch(manifest).tensors["w"], learner.bits)
    assert replica.deltas_applied == 1


def test_the_served_version_keeps_its_bytes_while_the_next_is_built_on_it(learner, replica):
    served, before = replica.fetch(learner.step()), learner.bits.copy()
    for _ in range(4):
        replica.fetch(learner.step()).release()
    np.testing.assert_array_equal(served.tensors["w"], before)
    assert replica.deltas_applied == 4


def test_every_so_many_versions_come_whole_whatever_changed(tmp_path):
    (tmp_path / "near").mkdir()
    made = Learner(tmp_path / "near", dense_every=3)
    assert [made.step().delta is None for _ in range(7)] == [True, False, True, False, False, True, False]
    made.publisher.close()


def test_who_joins_at_version_7_gets_that_one_whole_and_goes_on_with_deltas(learner, replica, tmp_path):
    for _ in range(7):
        manifest = learner.step()
        replica.fetch(manifest)
        learner.publisher.retire(learner.version)
    assert (manifest.version, manifest.delta.base_version) == (7, 6)
    (tmp_path / "third").mkdir()
    late = PullSubscriber([TcpPuller()], directory=tmp_path / "third")
    np.testing.assert_array_equal(late.fetch(manifest).tensors["w"], learner.bits)
    assert (late.deltas_applied, replica.deltas_applied) == (0, 6)
    np.testing.assert_array_equal(late.fetch(learner.step()).tensors["w"], learner.bits)
    assert late.deltas_applied == 1
    late.close()
