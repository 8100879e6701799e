"""Receivers and learners that are killed or stopped in the middle of a transfer."""

import os
import signal
import subprocess
import sys

import pytest

from slipstream.errors import TransportTimeout
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.control import Dial
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import stream_pull, tcp_wire
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.manifest import decode_manifest, encode_manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

RECEIVER = """
import os, signal, sys
from pathlib import Path
from slipstream.weights.bytes import arriving
from slipstream.weights.links import pulling
from slipstream.weights.links.tcp import stream_pull
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.manifest import decode_manifest
from slipstream.weights.links.tcp.tcp_pull import TcpPuller

directory, phase, signum = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
manifests = [decode_manifest(bytes.fromhex(word)) for word in sys.argv[4:]]
tcp_wire.FRAME_BYTES = 5000
take, frames = stream_pull.check_reply, []

def counting(*arguments):
    take(*arguments)
    frames.append(1)
    if phase == "receiving" and len(frames) == 10:
        strike()

def strike(*_):
    print("struck", flush=True)
    os.kill(os.getpid(), signum)

subscriber = pulling.PullSubscriber([TcpPuller()], directory=directory)
subscriber.fetch(manifests[0])
stream_pull.check_reply = counting
if phase == "verifying":
    arriving.compare = strike
if phase == "mapping":
    pulling.map_version = strike
subscriber.fetch(manifests[1])
"""

SERVER = """
import sys
from pathlib import Path
import numpy as np
from slipstream.weights.base import ArraySource
from slipstream.weights.manifest import encode_manifest, layout
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.stream_server import StreamServer

directory = Path(sys.argv[1])
model = {f"t{i}": ArraySource(np.full((4, 1024), 10.0 + i, np.float32)) for i in range(6)}
shm = ShmPublisher("crash", 1, layout(model, bucket_bytes=8192), directory=directory)
shelf = Shelf(directory)
publisher = ServingPublisher(shm, shelf, [StreamServer(shelf)])
print(encode_manifest(publisher.publish(1, model)).hex(), flush=True)
print(encode_manifest(publisher.publish(2, model)).hex(), flush=True)
sys.stdin.read()
"""


def pulls(directory, dial=None, **options):
    return PullSubscriber([TcpPuller(dial)], directory=directory, **options)


def serving(directory, plan, run="run", incarnation=1):
    shelf = Shelf(directory)
    shm = ShmPublisher(run, incarnation, plan, directory=directory)
    return ServingPublisher(shm, shelf, [StreamServer(shelf)])


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


@pytest.fixture
def hosts(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    return near, far


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["receiving", "verifying", "mapping"])
def test_a_receiver_that_dies_or_stops_delays_nobody_and_leaves_nothing(
    phase, signum, hosts, plain_layout, model, monkeypatch
):
    """Case 112"""
    near, far = hosts
    publisher = serving(near, plain_layout)
    manifests = [publisher.publish(version, model(float(version))) for version in (1, 2)]
    words = [encode_manifest(manifest).hex() for manifest in manifests]
    command = [sys.executable, "-c", RECEIVER, str(far), phase, str(int(signum)), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout.readline() == "struck\n"
        monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 5000)
        healthy = pulls(far, expected=plain_layout)
        assert numbers(healthy.fetch(manifests[1])) == [20.0 + index for index in range(6)]
        latest = publisher.publish(3, model(3.0))
        assert numbers(healthy.fetch(latest)) == [30.0 + index for index in range(6)]
        victim.kill()
    publisher.close()
    healthy.close()
    assert list(near.iterdir()) == []
    successor = pulls(far)
    successor._holds_buffers(latest)  # a replica's first fetch removes what dead ones left
    assert not [path for path in far.iterdir() if f".{victim.pid}." in path.name]
    successor.close()
    assert list(far.iterdir()) == []


def test_a_learner_killed_while_sending_leaves_the_old_version_served_and_the_next_one_is_fetched(
    hosts, plain_layout, model, monkeypatch
):
    """Case 72, case 103"""
    near, far = hosts
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 5000)
    subscriber = pulls(far, Dial(frame_seconds=3.0), expected=plain_layout)
    command = [sys.executable, "-c", SERVER, str(near)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as learner:
        first, second = (decode_manifest(bytes.fromhex(learner.stdout.readline())) for _ in range(2))
        served = subscriber.fetch(first)
        real, taken = stream_pull.check_reply, []

        def kill_after_three(*arguments):
            real(*arguments)
            taken.append(1)
            if len(taken) == 3:
                os.kill(learner.pid, signal.SIGKILL)

        monkeypatch.setattr(stream_pull, "check_reply", kill_after_three)
        with pytest.raises(TransportTimeout, match="no frame of version 2"):
            subscriber.fetch(second)
    assert len(taken) < 20
    assert numbers(served) == [10.0 + index for index in range(6)]
    monkeypatch.setattr(stream_pull, "check_reply", real)
    restarted = serving(near, plain_layout, "crash", 2)
    assert numbers(subscriber.fetch(restarted.publish(3, model(3.0)))) == [30.0 + index for index in range(6)]
    restarted.close()
    subscriber.close()
    assert list(near.iterdir()) == []
    assert list(far.iterdir()) == []
