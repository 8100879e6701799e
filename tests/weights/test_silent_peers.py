"""Peers that say nothing to a weights server, and those that say it slowly: an honest receiver is served."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from slipstream.lifecycle import descriptors
from slipstream.transport.zeromq.keys import generate
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.control import Dial, ServerOptions
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import stream_server
from slipstream.weights.links.tcp.stream_server import MOST_CONNECTIONS, StreamServer
from slipstream.weights.links.tcp.stream_wire import parse_endpoint
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.links.tcp.tcp_server import WeightServer


@pytest.fixture
def served(tmp_path, plain_layout, model):
    """Open a server of one version; gives it, its port, and whether a receiver can get the version."""
    opened = []

    def serve(make, dial=None):
        shelf = Shelf(tmp_path)
        server = make(shelf)
        publisher = ServingPublisher(ShmPublisher("run", 1, plain_layout, directory=tmp_path), shelf, [server])
        manifest, puller = publisher.publish(1, model(3.0)), TcpPuller(dial or Dial(frame_seconds=10.0))
        opened.append((publisher, puller))

        def pull():
            target = np.zeros(plain_layout.total_bytes, np.uint8)
            puller.pull(manifest, server.endpoint, "dense", target, 0, lambda stop: None)
            return bool(target.any())

        return server, int(server.endpoint.rsplit(":", 1)[1]), pull

    yield serve
    for publisher, puller in opened:
        puller.close()
        publisher.close()


def silent(port, count):
    return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]


def end(links):
    for link in links:
        link.close()


def test_a_stream_is_not_locked_by_silent_peers(served):
    server, port, pull = served(StreamServer)
    before, links = descriptors.cut["weights"], silent(port, 3 * MOST_CONNECTIONS)
    assert pull()
    assert descriptors.cut["weights"] - before == 2 * MOST_CONNECTIONS + 1
    assert server.refused == 0
    end(links)


def test_a_stream_is_not_locked_by_peers_with_the_token_that_ask_nothing(served):
    server, port, pull = served(StreamServer)
    links = silent(port, MOST_CONNECTIONS)
    for link in links:
        link.sendall(parse_endpoint(server.endpoint).token.encode())
    time.sleep(0.3)
    assert pull()
    end(links)


def test_a_token_that_comes_letter_by_letter_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(stream_server, "TOKEN_SECONDS", 0.5)
    _, port, _ = served(StreamServer)
    (link,) = silent(port, 1)
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"reset|pipe"):
        spell(link, 31)
    assert time.monotonic() < begun + 10
    end([link])


def spell(link, letters):
    for _ in range(letters):
        link.sendall(b"a")
        time.sleep(0.2)


def test_silent_peers_do_not_keep_a_receiver_from_a_zmq_server(served, monkeypatch):
    monkeypatch.setattr(descriptors, "MOST_SILENT", 20)
    keys = generate()
    options = ServerOptions(keys=keys, allowed={keys.public})
    before = descriptors.cut["weights"]
    server, port, pull = served(
        lambda shelf: WeightServer(shelf, options), Dial(keys, keys.public, frame_seconds=10.0)
    )
    links = silent(port, 300)
    assert pull()
    assert server.alive
    assert descriptors.cut["weights"] - before >= 280
    end(links)
