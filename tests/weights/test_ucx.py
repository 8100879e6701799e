"""UCX over loopback, with real processes: needs UCXX (the extra `ucx`)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import zmq

from slipstream.errors import TransportTimeout, WeightsError
from slipstream.transport.zeromq.keys import generate
from slipstream.weights.base import ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links.control import Dial, ServerOptions
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.manifest import encode_manifest, layout

pytest.importorskip("ucxx", reason="UCXX is not installed: pip install ucxx-cu12==0.52.0")

from slipstream.weights.links.ucx.ucx_core import UcxCore
from slipstream.weights.links.ucx.ucx_pull import UcxPuller
from slipstream.weights.links.ucx.ucx_server import UcxServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

RECEIVER = """
import os, signal, sys
from pathlib import Path
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.links.control import Dial
from slipstream.weights.manifest import decode_manifest
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.ucx.ucx_pull import UcxPuller, _Pull

tcp_wire.FRAME_BYTES = 1 << 20
directory, signum = Path(sys.argv[1]), int(sys.argv[2])
puller = UcxPuller(Dial(frame_seconds=60))
fetch = _Pull._fetch

def strike(self, number, request, target):
    if signum and number == 5:
        print("struck", flush=True)
        os.kill(os.getpid(), signum)
    fetch(self, number, request, target)

_Pull._fetch = strike
subscriber = PullSubscriber([puller], directory=directory)
print("ready", flush=True)
for line in sys.stdin:
    weights = subscriber.fetch(decode_manifest(bytes.fromhex(line)))
    print(weights.version, float(weights.tensors["t"].sum()), flush=True)
    weights.release()
subscriber.close()
"""
ROWS = 4 << 10  # 16 MiB in 16 chunks


class Learner:
    """A publisher of one large tensor, full of one number."""

    def __init__(self, directory, send_seconds=60.0, options=None):
        self.data = np.zeros((ROWS, 1024), np.float32)
        shelf = Shelf(directory)
        self.server = UcxServer(shelf, options or ServerOptions(), send_seconds)
        shm = ShmPublisher("ucx", 1, layout({"t": ArraySource(self.data)}), directory=directory)
        self.publisher = ServingPublisher(shm, shelf, [self.server])

    def publish(self, version):
        self.data[:] = version
        return self.publisher.publish(version, {"t": ArraySource(self.data)})


@pytest.fixture(autouse=True)
def small_frames(monkeypatch):
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 1 << 20)


@pytest.fixture
def hosts(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    return near, far


@pytest.fixture
def receiver(hosts):
    started = []

    def start(signum=0):
        command = [sys.executable, "-c", RECEIVER, str(hosts[1]), str(int(signum))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tell(process, manifest):
    process.stdin.write(encode_manifest(manifest).hex() + "\n")
    process.stdin.flush()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_three_receivers_dies_or_stops_and_the_others_finish(signum, hosts, receiver):
    """Case 112."""
    learner = Learner(hosts[0], send_seconds=3.0)
    manifest = learner.publish(1)
    victim, *others = receiver(signum), receiver(), receiver()
    for process in (victim, *others):
        tell(process, manifest)
    assert victim.stdout.readline() == "struck\n"
    for version in (2, 3):
        for process in others:
            assert process.stdout.readline() == f"{version - 1} {(version - 1) * ROWS * 1024.0}\n"
        manifest = learner.publish(version)
        for process in others:
            tell(process, manifest)
    end = time.monotonic() + 60
    while not learner.server.aborted and time.monotonic() < end:
        time.sleep(0.05)
    assert learner.server.aborted == 1
    latecomer = receiver()
    tell(latecomer, manifest)
    for process in (latecomer, *others):
        assert process.stdout.readline() == f"3 {3 * ROWS * 1024.0}\n"
        process.stdin.close()
        assert process.wait(30) == 0
    learner.publisher.close()
    assert list(hosts[0].iterdir()) == []


def test_only_the_holder_of_an_allowed_key_gets_weights(hosts):
    ours, friend, stranger = generate(), generate(), generate()
    learner = Learner(hosts[0], options=ServerOptions(keys=ours, allowed=[friend.public]))
    manifest = learner.publish(1)
    for keys, served in ((stranger, False), (friend, True)):
        puller = UcxPuller(Dial(keys, ours.public, frame_seconds=60.0 if served else 0.5))
        subscriber = PullSubscriber([puller], directory=hosts[1])
        if served:
            assert subscriber.fetch(manifest).tensors["t"][5, 5] == 1.0
        else:
            with pytest.raises(TransportTimeout, match=r"nothing within 0\.5 s"):
                subscriber.fetch(manifest)
        subscriber.close()
        subscriber.close()
    learner.publisher.close()
    learner.publisher.close()


def test_a_receiver_gives_up_at_its_deadline_and_the_next_version_comes(hosts, monkeypatch):
    learner = Learner(hosts[0])
    subscriber = PullSubscriber([UcxPuller(Dial(frame_seconds=0.5))], directory=hosts[1])
    monkeypatch.setattr(learner.server, "_begin", lambda *_: None)  # hears and never sends
    with pytest.raises(TransportTimeout, match=r"nothing within 0\.5 s"):
        subscriber.fetch(learner.publish(1))
    monkeypatch.undo()
    subscriber._pullers["ucx"]._dial = Dial(frame_seconds=60.0)
    assert subscriber.fetch(learner.publish(2)).tensors["t"][-1, -1] == 2.0
    learner.publisher.retire(9)
    with pytest.raises(WeightsError, match="gone"):
        subscriber.fetch(msgspec.structs.replace(learner.publish(3), version=99))
    subscriber.close()
    learner.publisher.close()


def test_a_forked_child_is_refused_instead_of_hanging():
    code = (
        "import os; from slipstream.weights.links.ucx.ucx_core import UcxCore; core = UcxCore()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try: core.progress()\n"
        "    except Exception as error: os._exit(7 if 'spawn' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "7\n", done.stderr


def asks(server):
    """A way to ask a server anything, and its answer; as a holder of the token."""
    context = zmq.Context()
    token, _, place = server.endpoint.removeprefix("ucx://").partition("@")
    sockets = []

    def ask(message, seconds=60.0):
        socket = context.socket(zmq.DEALER)
        sockets.append(socket)
        socket.connect(f"tcp://{place}")
        filled = {**message, "token": token} if message.get("type") == "hello" else message
        socket.send(msgspec.msgpack.encode(filled))
        answer = socket.recv() if socket.poll(round(1000 * seconds)) else b""
        return socket, answer and msgspec.msgpack.decode(answer)

    ask.end = lambda: context.destroy(linger=0)
    return ask


def test_a_member_gone_bad_ends_its_own_session_and_nobody_elses(hosts):
    """UCX ends the process that it gives a damaged address to, so nothing but exceptions would be caught here."""
    learner = Learner(hosts[0])
    manifest, ask = learner.publish(1), asks(learner.server)
    core = UcxCore()
    honest = core.address
    for address in (b"", honest[:97], bytes(80), b"\x05" * 80, honest[:3] + b"\xff" * 40):
        _, answer = ask({"type": "hello", "address": address}, 0.5 if not address else 60.0)
        assert not answer or answer["type"] == "problem", address
    socket, welcome = ask({"type": "hello", "address": honest})
    assert welcome["type"] == "welcome"
    chunk = {
        "run": "ucx",
        "incarnation": 1,
        "version": 1,
        "offset": 0,
        "length": 8,
        "part": "dense",
        "schema": 1,
    }
    fetch = {"type": "fetch", "session": welcome["session"], "number": 0, "request": chunk}
    nested = b"\x81\xa1x" + b"\x91" * 60_000 + b"\x90"
    for message in ({**fetch, "number": -1}, {**fetch, "number": 2**63}, {**fetch, "session": -1}):
        socket.send(msgspec.msgpack.encode(message))
    socket.send(nested)
    for number in range(100):
        socket.send(msgspec.msgpack.encode({**fetch, "number": number, "request": {**chunk, "version": 9}}))
    assert learner.server.alive
    subscriber = PullSubscriber([UcxPuller(Dial(frame_seconds=60.0))], directory=hosts[1])
    weights = subscriber.fetch(manifest)
    assert float(weights.tensors["t"].sum()) == ROWS * 1024.0
    assert learner.server.alive
    assert learner.server.refused >= 5
    weights.release()
    subscriber.close()
    ask.end()
    learner.publisher.close()
