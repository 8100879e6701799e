"""One process of a host pulls and the others map; hosts pass versions on, and ask the next when one fails."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from slipstream.errors import WeightsError
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.control import Dial
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest


@pytest.fixture
def publisher(tmp_path, plain_layout):
    near = tmp_path / "near"
    near.mkdir()
    shelf = Shelf(near)
    shm = ShmPublisher("run", 1, plain_layout, directory=near)
    made = ServingPublisher(shm, shelf, [StreamServer(shelf)])
    yield made
    made.close()


@pytest.fixture
def replica(tmp_path):
    """A replica on a host, by the host's name; every host has shared memory of its own."""
    made = []

    def start(host):
        directory = tmp_path / host
        directory.mkdir(exist_ok=True)
        puller = TcpPuller(Dial(frame_seconds=5.0))
        made.append(PullSubscriber([puller], directory=directory, host=host, serve=StreamServer))
        return made[-1]

    yield start
    for each in made:
        each.close()
        each.close()
    for each in made:
        assert list(each._directory.iterdir()) == []


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected(value):
    return [value * 10.0 + index for index in range(6)]


def test_one_process_of_a_host_pulls_and_the_next_takes_over_when_it_ends(publisher, replica, model):
    first, second = replica("far"), replica("far")
    manifest = publisher.publish(1, model(1.0))
    assert numbers(first.fetch(manifest)) == expected(1.0)
    mapped = second.fetch(manifest)
    assert numbers(mapped) == expected(1.0)
    assert (bool(first.relay), second.relay) == (True, "")
    first.close()
    assert numbers(second.fetch(publisher.publish(2, model(2.0)))) == expected(2.0)
    assert second.relay
    assert numbers(mapped) == expected(1.0)  # what is mapped stays, whoever has gone


def test_a_host_gets_a_version_from_the_host_in_front_of_it(publisher, replica, model):
    front, behind = replica("a"), replica("b")
    manifest = publisher.publish(1, model(1.0))
    front.fetch(manifest)
    routed = msgspec.structs.replace(manifest, routes={"b": [front.relay]})
    publisher.close()  # so that it can come from there only
    assert numbers(behind.fetch(routed)) == expected(1.0)


def test_when_the_host_in_front_has_gone_the_next_one_on_the_line_is_asked(publisher, replica, model):
    front, behind = replica("a"), replica("b")
    manifest = publisher.publish(1, model(1.0))
    front.fetch(manifest)
    routed = msgspec.structs.replace(manifest, routes={"b": [front.relay]})
    front.close()
    assert numbers(behind.fetch(routed)) == expected(1.0)


def test_what_has_arrived_is_passed_on_while_the_rest_is_still_coming(publisher, tmp_path, model):
    manifest = publisher.publish(1, model(1.0))
    shelf = Shelf(tmp_path, relay=True)
    early = ChunkRequest(run="run", incarnation=1, version=1, offset=0, length=8192)
    assert shelf.chunk(early, shelf.until()) is None  # not begun, but it may come
    with pytest.raises(WeightsError, match="gone"):
        shelf.chunk(early, 0.0)
    arriving = shelf.arriving(manifest, np.arange(98304, dtype=np.uint32).view(np.uint8)[:98304])
    assert shelf.chunk(early, 0.0) is None
    arriving.advance(8192)
    assert len(shelf.chunk(early, 0.0)) == 8192
    shelf.withdraw(manifest)
    with pytest.raises(WeightsError, match="gone"):
        shelf.chunk(early, 0.0)


def test_a_chain_that_all_ask_at_once_is_served(publisher, replica, model):
    hosts = [replica(name) for name in "abc"]
    first = publisher.publish(1, model(1.0))
    for host in hosts:
        host.fetch(first)
    routes = {"b": [hosts[0].relay], "c": [hosts[1].relay, hosts[0].relay]}
    manifest = msgspec.structs.replace(publisher.publish(2, model(2.0)), routes=routes)
    got = []
    threads = [
        threading.Thread(target=lambda host=host: got.append(numbers(host.fetch(manifest)))) for host in hosts
    ]
    for thread in reversed(threads):  # the last of the chain asks first
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [expected(2.0)] * 3
