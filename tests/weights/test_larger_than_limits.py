"""Every way of a version, with more bytes than its frames, buckets, windows and blocks hold, and with a key."""

from __future__ import annotations

import importlib.util
import queue
import time
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from slipstream.config.sections.services_config import WeightsSection
from slipstream.errors import TransportTimeout
from slipstream.transport.zeromq.bounds import SLACK_BYTES
from slipstream.transport.zeromq.keys import generate
from slipstream.weights.base import ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.links import control, nccl
from slipstream.weights.links import folder_link as files
from slipstream.weights.links.control import Dial
from slipstream.weights.links.folder_link import FileStore
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import stream_pull, tcp_pull, tcp_wire
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.links.ucx import ucx_pull
from slipstream.weights.manifest import BUCKET_BYTES, layout
from slipstream.weights.transports import open_puller, open_server

NO_UCX = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed: pip install ucxx-cu12==0.52.0"
)
UCX = [
    pytest.param(("ucx", keyed), id=f"ucx-{'keyed' if keyed else 'open'}", marks=NO_UCX)
    for keyed in (True, False)
]
LINKS = [pytest.param(("tcp", True), id="tcp-keyed"), pytest.param(("tcp", False), id="tcp-open"), *UCX]
NCCL = pytest.param(("nccl", False), id="nccl")  # with pipes for the GPUs' part
OTHERS = [pytest.param((way, False), id=way) for way in ("shm", "file")]
SMALL_FRAME = 128 << 10
SMALL_BUCKET = 300_000
SETTINGS = WeightsSection(frame_seconds=20.0)


class Pipe:
    """Stands for a pair of GPUs: what one rank sends comes out at the other, chunk by chunk."""

    port = 1
    chunks: ClassVar[dict[str, queue.Queue]] = {}

    def __init__(self, host, port, name, rank, seconds):
        self._chunks = self.chunks.setdefault(name, queue.Queue())
        self._seconds = seconds

    def send(self, chunk):
        self._chunks.put(chunk.copy(), timeout=self._seconds)

    def receive(self, place):
        chunk = self._chunks.get(timeout=self._seconds)
        assert len(chunk) == len(place)
        place[:] = chunk

    def abort(self):
        pass


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(nccl, "check_available", lambda: None)
    monkeypatch.setattr(nccl, "Pair", Pipe)


@pytest.fixture
def small(monkeypatch):
    """Frames, blocks and told parts so small that a cheap version has many of each; returns a layout's bucket."""
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", SMALL_FRAME)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(stream_pull, "PART_BYTES", 50_000)
    return SMALL_BUCKET


class Way:
    """A learner's publisher of one version after the other, and as many hosts as a test asks for."""

    def __init__(self, tmp_path, way, nbytes, bucket, dense_every=0):
        self.scheme, keyed = way
        self.keys = generate() if keyed else None
        self._place = tmp_path
        random = np.random.default_rng(0)
        self.data = [random.integers(0, 1 << 16, nbytes // 8, np.uint16) for _ in range(4)]
        near = tmp_path / "near"
        near.mkdir()
        shelf = Shelf(near)
        servers = [self.server(shelf)] if self.scheme in ("tcp", "ucx", "nccl") else []
        stores = [FileStore(str(tmp_path / "store"), "run", 1)] if self.scheme == "file" else []
        shm = ShmPublisher("run", 1, layout(self._tensors(), bucket_bytes=bucket), directory=near)
        self.publisher = ServingPublisher(shm, shelf, servers, stores, dense_every)
        self._hosts = []
        self._version = 0

    def server(self, shelf):
        return open_server(self.scheme, shelf, SETTINGS, "127.0.0.1", 0, self.keys)

    def host(self, name="far"):
        directory = self._place / name
        directory.mkdir()
        if self.scheme == "shm":
            made = ShmSubscriber(directory=self._place / "near")
        else:
            puller = open_puller(self.scheme, SETTINGS, self.keys)
            serve = None if self.scheme == "file" else self.server
            made = PullSubscriber([puller], directory=directory, host=name, serve=serve)
        self._hosts.append(made)
        return made

    def publish(self):
        self._version += 1
        return self.publisher.publish(self._version, self._tensors())

    def change(self, share):
        """Move so large a share of the elements."""
        random = np.random.default_rng(self._version)
        for part in self.data:
            part[random.random(len(part)) < share] += 1 + self._version

    def assert_arrived(self, weights):
        assert weights.version == self._version
        for index, part in enumerate(self.data):
            found = np.asarray(weights.tensors[f"t{index}"]).view(np.uint16)
            np.testing.assert_array_equal(found, part)

    def close(self):
        for host in self._hosts:
            host.close()
        self.publisher.close()

    def _tensors(self):
        return {f"t{index}": ArraySource(part, "bfloat16") for index, part in enumerate(self.data)}


@pytest.fixture
def open_way(tmp_path):
    made = []

    def start(*arguments, **options):
        made.append(Way(tmp_path, *arguments, **options))
        return made[-1]

    yield start
    for way in made:
        way.close()


@pytest.mark.parametrize("way", [*LINKS, NCCL, *OTHERS])
def test_a_version_of_many_frames_and_buckets_arrives(way, open_way, small):
    opened = open_way(way, 3 << 20, small)
    manifest = opened.publish()
    assert manifest.layout.buckets > 3
    assert manifest.layout.total_bytes > SMALL_FRAME * 2 * max(tcp_pull.WINDOW, ucx_pull.WINDOW)
    opened.assert_arrived(opened.host().fetch(manifest))


@pytest.mark.parametrize("way", [*LINKS, NCCL])
def test_a_version_of_more_frames_than_one_question_could_list(way, open_way, small, monkeypatch):
    """As a true version of five gigabytes and more."""
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 2048)
    opened = open_way(way, 3 << 20, small)
    opened.assert_arrived(opened.host().fetch(opened.publish()))


@pytest.mark.parametrize("way", [*LINKS, NCCL, *OTHERS])
def test_a_version_larger_than_the_real_frame_and_bucket_arrives(way, open_way):
    """True sizes: frames of 8 MiB, buckets of 32 MiB, and a window of four frames."""
    nbytes = BUCKET_BYTES + tcp_wire.FRAME_BYTES + 4096
    assert nbytes > tcp_wire.FRAME_BYTES * tcp_pull.WINDOW
    opened = open_way(way, nbytes, BUCKET_BYTES)
    opened.assert_arrived(opened.host().fetch(opened.publish()))


@pytest.mark.parametrize("way", [*LINKS, NCCL, OTHERS[1]])
def test_a_delta_of_many_frames_arrives(way, open_way, small):
    opened = open_way(way, 12 << 20, small, dense_every=100)
    host = opened.host()
    host.fetch(opened.publish())
    opened.change(0.1)
    manifest = opened.publish()
    assert manifest.delta is not None
    assert manifest.delta.nbytes > 2 * SMALL_FRAME
    opened.assert_arrived(host.fetch(manifest))
    assert (host.deltas_applied, host.deltas_failed) == (1, 0)


@pytest.mark.parametrize("way", LINKS)
def test_a_version_of_many_frames_is_passed_on_by_a_host(way, open_way, small):
    opened = open_way(way, 3 << 20, small)
    front, behind = opened.host("a"), opened.host("b")
    manifest = opened.publish()
    front.fetch(manifest)
    only = msgspec.structs.replace(manifest, routes={"b": [front.relay]}, locations={})
    opened.assert_arrived(behind.fetch(only))


@pytest.mark.parametrize("way", LINKS[:1])
def test_a_real_frame_is_passed_on_by_a_host_over_a_keyed_link(way, open_way):
    opened = open_way(way, 20 << 20, BUCKET_BYTES)
    front, behind = opened.host("a"), opened.host("b")
    manifest = opened.publish()
    front.fetch(manifest)
    only = msgspec.structs.replace(manifest, routes={"b": [front.relay]}, locations={})
    opened.assert_arrived(behind.fetch(only))


@pytest.mark.parametrize("way", LINKS[:1])
def test_a_link_that_is_cut_by_a_limit_says_so_at_once_and_names_the_limit(way, open_way, small, monkeypatch):
    """A receiver that takes less than it asks for, as no release of ours does any more."""
    opened = open_way(way, 3 << 20, small)
    host = opened.host()
    monkeypatch.setattr(control, "largest_reply", lambda: SMALL_FRAME // 2)
    limit = SMALL_FRAME // 2 + SLACK_BYTES
    started = time.monotonic()
    with pytest.raises(
        TransportTimeout, match=rf"no frame of version 1; the link was cut: .* over the {limit} bytes"
    ):
        host.fetch(opened.publish())
    assert time.monotonic() - started < SETTINGS.frame_seconds / 2


def test_a_server_that_does_not_let_the_key_in_is_named(open_way, small):
    opened = open_way(("tcp", True), 3 << 20, small)
    manifest = opened.publish()
    for keys, words in ((generate(), "another key"), (None, "key")):
        puller = TcpPuller(Dial(keys, keys.public if keys else "", frame_seconds=0.5))
        with pytest.raises(TransportTimeout, match=rf"within 0.5 s; .*{words} \(network.keys\)"):
            puller.pull(manifest, manifest.locations["tcp"], "dense", np.empty(8, np.uint8), 0, lambda _: None)
        puller.close()
