import threading

import msgspec
import numpy as np
import pytest
import zmq

from slipstream.config.sections.services_config import WeightsSection
from slipstream.errors import TransportTimeout, UserError, WeightsError
from slipstream.transport.zeromq.keys import generate
from slipstream.weights.base import ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.links.control import Dial, ServerOptions
from slipstream.weights.links.pulling import AutoSubscriber, PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.links.tcp.tcp_server import WeightServer
from slipstream.weights.manifest import layout
from slipstream.weights.transports import open_publisher, open_subscriber


@pytest.fixture
def hosts(tmp_path):
    """Two folders that stand for the shared memory of two hosts."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    return near, far


@pytest.fixture
def shelf(hosts):
    return Shelf(hosts[0])


@pytest.fixture(
    params=[StreamServer, lambda shelf: WeightServer(shelf, ServerOptions())], ids=["stream", "zmq"]
)
def server(request, shelf):
    made = request.param(shelf)
    yield made
    made.close()


@pytest.fixture
def publisher(hosts, shelf, server, plain_layout):
    made = ServingPublisher(ShmPublisher("run", 1, plain_layout, directory=hosts[0]), shelf, [server])
    yield made
    made.close()


def pulls(directory, dial=None, **options):
    return PullSubscriber([TcpPuller(dial)], directory=directory, **options)


@pytest.fixture
def subscriber(hosts, plain_layout, monkeypatch):
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 5000)  # many frames, across buckets
    made = pulls(hosts[1], Dial(frame_seconds=5.0), expected=plain_layout)
    yield made
    made.close()


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected_numbers(value):
    return [value * 10.0 + index for index in range(6)]


def test_a_version_arrives_whole_on_another_host(publisher, subscriber, model):
    weights = subscriber.fetch(publisher.publish(1, model(3.0)))
    assert weights.version == 1
    for index, array in enumerate(weights.tensors.values()):
        np.testing.assert_array_equal(array, np.full((4, 1024), 30.0 + index, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        weights.tensors["t0"][0, 0] = 1.0


def test_two_buffers_are_used_in_turn_and_never_under_a_reader(publisher, subscriber, model, hosts):
    served, files = None, set()
    for version in range(8):
        fetched = subscriber.fetch(publisher.publish(version, model(float(version))))
        if served is not None:
            assert numbers(served) == expected_numbers(float(version - 1))
            served.release()
        served = fetched
        assert numbers(served) == expected_numbers(float(version))
        publisher.retire(version)
        files |= {path.stat().st_ino for path in hosts[1].iterdir() if path.suffix != ".lock"}
    assert len(files) <= 3


def test_a_staged_version_is_offered_at_its_commit(publisher, subscriber, model):
    manifest = publisher.stage(1, model(1.0)).commit()
    assert manifest.locations["tcp"].startswith(("tcp://127.0.0.1:", "stream://"))
    assert numbers(subscriber.fetch(manifest)) == expected_numbers(1.0)


def test_corruption_on_the_way_is_refused_and_the_next_fetch_works(publisher, subscriber, model, monkeypatch):
    manifest, real = publisher.publish(1, model(1.0)), TcpPuller.pull

    def flip(self, manifest, endpoint, part, target, start, filled):
        def spoilt(stop):
            target[0] ^= stop == 5000  # once
            filled(stop)

        real(self, manifest, endpoint, part, target, start, spoilt)

    monkeypatch.setattr(TcpPuller, "pull", flip)
    with pytest.raises(WeightsError, match=r"bucket 0 of 12 \(with t0\)"):
        subscriber.fetch(manifest)
    monkeypatch.undo()
    assert numbers(subscriber.fetch(manifest)) == expected_numbers(1.0)


def test_a_retired_version_is_gone_and_the_newest_stays(publisher, subscriber, model):
    first, second = (publisher.publish(version, model(float(version))) for version in (1, 2))
    publisher.retire(9)
    with pytest.raises(WeightsError, match="version 1 of learner incarnation 1 is gone; fetch the newest"):
        subscriber.fetch(first)
    assert numbers(subscriber.fetch(second)) == expected_numbers(2.0)


def test_a_server_that_says_nothing_meets_the_deadline(hosts, plain_layout, publisher, server, model):
    manifest = publisher.publish(1, model())
    server.close()
    subscriber = pulls(hosts[1], Dial(frame_seconds=0.05))
    with pytest.raises(TransportTimeout, match=r"//127.0.0.1:\d+: no frame of version 1 within 0.05 s"):
        subscriber.fetch(manifest)
    subscriber.close()
    assert list(hosts[1].iterdir()) == []


@pytest.mark.parametrize(
    "server", [lambda shelf: WeightServer(shelf, ServerOptions())], indirect=True, ids=["zmq"]
)
def test_malformed_requests_are_counted_and_stop_nothing(publisher, subscriber, server, model):
    manifest = publisher.publish(1, model(1.0))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    bad = {"run": "run", "incarnation": 1, "version": 1, "offset": 0, "schema": 1}
    for message in (
        [b"\xc1"],
        [b"", b"", b""],
        [msgspec.msgpack.encode(bad | {"length": 1 << 40})],
        [msgspec.msgpack.encode(bad | {"length": 8, "schema": 9})],
        [msgspec.msgpack.encode(bad | {"length": 8, "offset": -1})],
    ):
        socket.send_multipart(message)
    socket.send(msgspec.msgpack.encode(bad | {"length": 8, "offset": 1 << 40}))
    assert socket.poll(5000)
    assert b"its dense form has 98304 bytes" in socket.recv_multipart()[0]
    assert server.refused == 5
    context.destroy(linger=0)
    assert numbers(subscriber.fetch(manifest)) == expected_numbers(1.0)


def test_only_the_holder_of_an_allowed_key_gets_weights(hosts, plain_layout, model):
    ours, friend, stranger = generate(), generate(), generate()
    shelf = Shelf(hosts[0])
    server = WeightServer(shelf, ServerOptions(keys=ours, allowed=[friend.public]))
    publisher = ServingPublisher(ShmPublisher("keys", 1, plain_layout, directory=hosts[0]), shelf, [server])
    manifest = publisher.publish(1, model(1.0))
    for dial in (Dial(frame_seconds=0.3), Dial(stranger, ours.public, frame_seconds=0.3)):
        refused = pulls(hosts[1], dial)
        with pytest.raises(TransportTimeout):
            refused.fetch(manifest)
        refused.close()
    good = pulls(hosts[1], Dial(friend, ours.public))
    assert numbers(good.fetch(manifest)) == expected_numbers(1.0)
    assert server.refused >= 1
    good.close()
    publisher.close()


def test_three_receivers_pull_at_once(publisher, model, hosts, plain_layout):
    manifest, got = publisher.publish(1, model(1.0)), []

    def pull():
        subscriber = pulls(hosts[1], expected=plain_layout)
        got.append(numbers(subscriber.fetch(manifest)))
        subscriber.close()

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [expected_numbers(1.0)] * 3


def test_auto_maps_what_is_here_and_pulls_what_is_not(publisher, hosts, model):
    manifest = publisher.publish(1, model(1.0))
    for directory, pulled in ((hosts[0], False), (hosts[1], True)):
        auto = AutoSubscriber(ShmSubscriber(directory=directory), pulls(directory))
        weights = auto.fetch(manifest)
        assert numbers(weights) == expected_numbers(1.0)
        assert any("-relay." in path.name for path in directory.iterdir()) == pulled
        auto.close()


def test_a_taken_port_is_named_with_the_setting_and_leaves_no_files(server, plain_layout):
    port = int(server.endpoint.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"weights.port {port} on 127.0.0.1"):
        open_publisher("slipstream-test-port", 1, plain_layout, WeightsSection(transport="tcp", port=port))


def test_the_factory_opens_both_ends(model):
    tensors, settings = model(2.0), WeightsSection(transport="tcp")
    publisher = open_publisher("slipstream-test-tcp", 1, layout(tensors), settings)
    subscriber = open_subscriber(settings, expected=layout(tensors))
    try:
        assert numbers(subscriber.fetch(publisher.publish(1, tensors))) == expected_numbers(2.0)
    finally:
        subscriber.close()
        publisher.close()


def test_a_version_that_does_not_fit_the_model_is_refused_before_a_byte_is_pulled(publisher, hosts, model):
    other = layout(model() | {"t9": ArraySource(np.zeros(3, np.float32))})
    subscriber = pulls(hosts[1], expected=other)
    with pytest.raises(WeightsError, match="t9: missing"):
        subscriber.fetch(publisher.publish(1, model()))
    subscriber.close()
    assert list(hosts[1].iterdir()) == []
