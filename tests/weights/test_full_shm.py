"""Shared memory that is really full: what is served stays whole, and the next version comes when there is room."""

import os
import subprocess

import pytest

from slipstream.errors import UserError
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")


@pytest.fixture
def small(tmp_path):
    """A tmpfs with room for two versions of the model and not for three."""
    place = tmp_path / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected(value):
    return [value * 10.0 + index for index in range(6)]


def test_a_learner_without_room_says_so_and_publishes_again_when_there_is_some(small, plain_layout, model):
    publisher = ShmPublisher("full", 1, plain_layout, directory=small)
    subscriber = ShmSubscriber(directory=small)
    held = [subscriber.fetch(publisher.publish(version, model(float(version)))) for version in (1, 2)]
    with pytest.raises(UserError, match=r"small has \d+ bytes free, the weights need 98304.*--shm-size"):
        publisher.publish(3, model(3.0))
    assert [numbers(each) for each in held] == [expected(1.0), expected(2.0)]
    held[0].release()
    publisher.retire(2)
    assert numbers(subscriber.fetch(publisher.publish(3, model(3.0)))) == expected(3.0)
    publisher.close()
    subscriber.close()


def test_a_replica_without_room_keeps_what_it_serves_and_catches_up_when_there_is_some(
    small, tmp_path, plain_layout, model
):
    near = tmp_path / "near"
    near.mkdir()
    shelf = Shelf(near)
    publisher = ServingPublisher(
        ShmPublisher("full", 1, plain_layout, directory=near), shelf, [StreamServer(shelf)]
    )
    replica = PullSubscriber([TcpPuller()], directory=small)
    served = replica.fetch(publisher.publish(1, model(1.0)))
    filler = small / "filler"
    filler.write_bytes(b"x" * 60_000)
    spare = replica.fetch(publisher.publish(2, model(2.0)))
    with pytest.raises(UserError, match=r"small has \d+ bytes free, the weights need 98304"):
        replica.fetch(publisher.publish(3, model(3.0)))
    assert (numbers(served), numbers(spare)) == (expected(1.0), expected(2.0))
    served.release()
    filler.unlink()
    assert numbers(replica.fetch(publisher.publish(4, model(4.0)))) == expected(4.0)
    replica.close()
    publisher.close()
