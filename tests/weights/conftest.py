"""Small models as numpy arrays, and a publisher script that a test can kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.weights.base import ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import Layout, layout

Sources = dict[str, ArraySource]

PUBLISHER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from slipstream.weights.bytes import copying
from slipstream.weights.host import shm
from slipstream.weights.base import ArraySource
from slipstream.weights.manifest import encode_manifest, layout

directory, incarnation, phase = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Deadly(ArraySource):
    def raw(self, first, last):
        die()

def model(value):
    return {f"t{i}": ArraySource(np.full((4, 1024), value * 10 + i, np.float32)) for i in range(6)}

tensors = model(1)
plan = layout(tensors, bucket_bytes=8192)
publisher = shm.ShmPublisher("crash", incarnation, plan, directory=directory, threads=1)
manifest = publisher.publish(1, tensors)
(directory / "manifest").write_bytes(encode_manifest(manifest))
tensors = model(2)
if phase == "copying":
    tensors["t3"] = Deadly(np.zeros((4, 1024), np.float32))
if phase == "digesting":
    copying.Digest.text = die
staged = publisher.stage(2, tensors)
if phase == "naming":
    staged.segment.rename = die
staged.commit()
if phase == "announcing":
    die()
print("ready", flush=True)
sys.stdin.read()
publisher.close()
"""


def make_model(value: float = 1.0, tensors: int = 6, rows: int = 4) -> Sources:
    """Tensors `t0`, `t1`, ... of [rows, 1024] float32, each full of another number."""
    return {
        f"t{index}": ArraySource(np.full((rows, 1024), value * 10 + index, np.float32))
        for index in range(tensors)
    }


@pytest.fixture
def model() -> Callable[..., Sources]:
    return make_model


@pytest.fixture
def plain_layout() -> Layout:
    """Layout of `model()` in buckets of 8 KiB, so that tensors span buckets."""
    return layout(make_model(), bucket_bytes=8192)


@pytest.fixture
def publisher_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a publisher of versions 1 and 2 in `tmp_path` that dies by SIGKILL in a phase, or waits."""
    started: list[subprocess.Popen[str]] = []

    def start(phase: str, incarnation: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PUBLISHER, str(tmp_path), str(incarnation), phase]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def publisher(tmp_path: Path, plain_layout: Layout, clock: Clock) -> Iterator[ShmPublisher]:
    made = ShmPublisher("run", 1, plain_layout, directory=tmp_path, keep_seconds=60, clock=clock)
    yield made
    made.close()


@pytest.fixture
def subscriber(tmp_path: Path, plain_layout: Layout) -> Iterator[ShmSubscriber]:
    made = ShmSubscriber(expected=plain_layout, directory=tmp_path)
    yield made
    made.close()
