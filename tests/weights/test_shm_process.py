"""Publishers that are killed, and what the replicas and the next learner then find."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import decode_manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


@pytest.mark.parametrize("phase", ["copying", "digesting", "naming", "announcing"])
def test_a_publisher_killed_in_any_phase_leaves_a_complete_version_and_the_next_cleans_up(
    phase, publisher_process, tmp_path, plain_layout, model
):
    """Case 72, case 103"""
    process = publisher_process(phase)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    subscriber = ShmSubscriber(expected=plain_layout, directory=tmp_path)
    served = subscriber.fetch(decode_manifest((tmp_path / "manifest").read_bytes()))
    assert numbers(served) == [10.0 + index for index in range(6)]

    successor = ShmPublisher("crash", 2, plain_layout, directory=tmp_path)
    assert not list(tmp_path.glob("slipstream-crash-1*"))
    assert numbers(served) == [10.0 + index for index in range(6)]  # mapped, so not cut off
    assert numbers(subscriber.fetch(successor.publish(2, model(5.0)))) == [50.0 + index for index in range(6)]
    successor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]


def test_a_start_leaves_the_files_of_a_living_publisher_alone(publisher_process, tmp_path, plain_layout):
    process = publisher_process("never")
    assert process.stdout.readline() == "ready\n"
    successor = ShmPublisher("crash", 2, plain_layout, directory=tmp_path)
    assert (tmp_path / "slipstream-crash-1-2").exists()
    assert (tmp_path / "slipstream-crash-1.lock").exists()
    process.communicate("", timeout=120)
    assert process.returncode == 0
    successor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]


READER = """
import sys, os
from pathlib import Path
from slipstream.weights.manifest import decode_manifest
from slipstream.weights.host.shm_reader import ShmSubscriber
weights = ShmSubscriber(directory=Path(sys.argv[1])).fetch(decode_manifest(bytes.fromhex(sys.argv[2])))
print("mapped", flush=True)
sys.stdin.readline()
print(*[float(a.min()) for a in weights.tensors.values()], *[float(a.max()) for a in weights.tensors.values()])
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reader_process_keeps_its_version_while_newer_ones_are_published(
    stopped, tmp_path, plain_layout, model
):
    """Case 74"""
    from slipstream.weights.manifest import encode_manifest

    publisher = ShmPublisher("reader", 1, plain_layout, directory=tmp_path)
    manifest = encode_manifest(publisher.publish(1, model(1.0))).hex()
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path), manifest], stdin=-1, stdout=-1, text=True
    ) as reader:
        assert reader.stdout.readline() == "mapped\n"
        if stopped:
            reader.send_signal(signal.SIGSTOP)
        for version in range(2, 8):
            publisher.publish(version, model(float(version)))
            publisher.retire(version)
        reader.send_signal(signal.SIGCONT)
        out, _ = reader.communicate("\n", timeout=120)
    assert [float(word) for word in out.split()] == [10.0 + index for index in range(6)] * 2
    publisher.close()


def test_a_killed_reader_gives_its_pages_back(tmp_path, plain_layout, model):
    from slipstream.weights.manifest import encode_manifest

    publisher = ShmPublisher("killed", 1, plain_layout, directory=tmp_path)
    first = publisher.publish(1, model(1.0))
    inode = (tmp_path / first.locations["shm"]).stat().st_ino
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path), encode_manifest(first).hex()],
        stdin=-1,
        stdout=-1,
        text=True,
    ) as reader:
        assert reader.stdout.readline() == "mapped\n"
        reader.kill()
    publisher.publish(2, model(2.0))
    publisher.retire(2)
    third = publisher.publish(3, model(3.0))
    assert (tmp_path / third.locations["shm"]).stat().st_ino == inode
    np.testing.assert_array_equal(
        ShmSubscriber(directory=tmp_path).fetch(third).tensors["t0"], np.float32(30.0)
    )
    publisher.close()
