"""A host's puller that is killed or stopped in the middle of a version: its neighbours and the hosts behind go on."""

import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.links import pulling
from slipstream.weights.links.control import Dial
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.manifest import encode_manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

RELAY = """
import os, sys
from pathlib import Path
from slipstream.weights.links import pulling
from slipstream.weights.links.tcp import stream_pull
from slipstream.weights.links.tcp import tcp_wire
from slipstream.weights.manifest import decode_manifest
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller

tcp_wire.FRAME_BYTES = 5000
take, frames = stream_pull.check_reply, []

def strike_at_ten(*arguments):
    take(*arguments)
    frames.append(1)
    if len(frames) == 10:
        print("struck", flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))

subscriber = pulling.PullSubscriber([TcpPuller()], directory=Path(sys.argv[1]), host="a", serve=StreamServer)
subscriber.fetch(decode_manifest(bytes.fromhex(sys.stdin.readline())))
print(subscriber.relay, flush=True)
stream_pull.check_reply = strike_at_ten
subscriber.fetch(decode_manifest(bytes.fromhex(sys.stdin.readline())))
"""


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected(value):
    return [value * 10.0 + index for index in range(6)]


@pytest.fixture
def publisher(tmp_path, plain_layout):
    near = tmp_path / "near"
    near.mkdir()
    shelf = Shelf(near)
    made = ServingPublisher(ShmPublisher("run", 1, plain_layout, directory=near), shelf, [StreamServer(shelf)])
    yield made
    made.close()
    assert list(near.iterdir()) == []


@pytest.fixture
def replica(tmp_path):
    """A replica on a host, by the host's name."""
    made = []

    def start(host):
        (tmp_path / host).mkdir(exist_ok=True)
        puller = TcpPuller(Dial(frame_seconds=2.0))
        made.append(PullSubscriber([puller], directory=tmp_path / host, host=host, serve=StreamServer))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_that_dies_or_hangs_in_the_middle_of_a_version_holds_nobody_up(
    signum, publisher, replica, model, tmp_path, monkeypatch
):
    """Case 112. Behind it is another host, beside it another replica of its own host."""
    monkeypatch.setattr(tcp_wire, "FRAME_BYTES", 5000)
    monkeypatch.setattr(pulling, "SHARE_SECONDS", 1.0)
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", RELAY, str(tmp_path / "a"), str(int(signum))]
    got = {}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as relay:
        try:

            def tell(manifest):
                relay.stdin.write(encode_manifest(manifest).hex() + "\n")
                relay.stdin.flush()
                return relay.stdout.readline().strip()

            endpoint = tell(publisher.publish(1, model(1.0)))
            manifest = publisher.publish(2, model(2.0))
            routed = msgspec.structs.replace(manifest, routes={"b": [endpoint]})
            behind, beside = replica("b"), replica("a")
            threads = [
                threading.Thread(target=lambda: got.update(behind=numbers(behind.fetch(routed)))),
                threading.Thread(target=lambda: got.update(beside=numbers(beside.fetch(manifest)))),
            ]
            threads[0].start()  # it waits at the relay for a version that is not there yet
            assert tell(manifest) == "struck"
            threads[1].start()
            for thread in threads:
                thread.join(120)
        finally:
            relay.kill()
    assert got == {"behind": expected(2.0), "beside": expected(2.0)}
    latest = publisher.publish(3, model(3.0))
    assert [numbers(each.fetch(latest)) for each in (behind, beside)] == [expected(3.0)] * 2
