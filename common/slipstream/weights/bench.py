"""How fast weights travel on this machine: each link to some receivers, beside one memcpy of the same bytes.

A round publishes one version and ends when every receiver, a process of its own, has it and has compared each digest.
`stall` is what the learner waits for. Receivers of one machine compete with the sender for its cores. `tcp+key` is
tcp in a run with a key.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.config.sections.services_config import WeightsSection
from slipstream.transport.zeromq.keys import KeyPair, keys_of, make
from slipstream.weights.base import ArraySource, Puller, Server, VersionStore
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.links.folder_link import FileStore
from slipstream.weights.links.pulling import PullSubscriber
from slipstream.weights.links.serving import ServingPublisher
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.manifest import decode_manifest, encode_manifest, layout
from slipstream.weights.transports import open_puller, open_server

WARM_UP = 2
KEYED = "+key"
SETTINGS = WeightsSection(frame_seconds=120.0)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds from the start of a publish until the copy was made, the version was announced, all had it verified;
    and CPU seconds of all processes."""

    stall: float
    published: float
    verified: float
    cpu: float


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Medians of one method; GB/s counts delivered bytes, CPU seconds are per GB delivered."""

    method: str
    receivers: int
    milliseconds: float
    gb_per_s: float
    cpu_s_per_gb: float
    stall_of_memcpy: float
    published_of_memcpy: float


Paired = Sequence[tuple[float, Round]]  # each round with the seconds of a memcpy just before it


def paired_of(rounds: Iterable[Sequence[float]]) -> Paired:
    """Rounds from plain numbers: those of the memcpy, then the fields of `Round`."""
    return [(memcpy, Round(*rest)) for memcpy, *rest in rounds]


def cut(data: np.ndarray) -> dict[str, np.ndarray]:
    """An array [rows, 1024] as tensors of 4 MiB, about what the matrices of a small model have."""
    step = max(1, (4 << 20) // max(1, data[:1].nbytes))
    return {f"w{first}": data[first : first + step] for first in range(0, len(data), step)}


class Bench:
    """A publisher over one link, and its receivers."""

    def __init__(self, link: str, receivers: int, data: np.ndarray, place: Path) -> None:
        self._tensors = {name: ArraySource(part) for name, part in cut(data).items()}
        self._version = 0
        near = place / "near"
        near.mkdir(parents=True)
        shelf = Shelf(near)
        servers: list[Server] = []
        stores: list[VersionStore] = []
        if link.endswith(KEYED):
            make(place)
        if link == "file":
            stores.append(FileStore(str(place / "store"), "bench", receivers))
        elif link != "shm":
            scheme, keys = _keyed(link, place)
            servers.append(open_server(scheme, shelf, SETTINGS, "127.0.0.1", 0, keys))
        shm = ShmPublisher("bench", receivers, layout(self._tensors), directory=near)
        self._publisher = ServingPublisher(shm, shelf, servers, stores)
        self._processes = [self._receiver(link, place, index) for index in range(receivers)]
        for process in self._processes:
            _answer(process)

    def round(self) -> Round:
        self._version += 1
        wall, cpu = time.perf_counter(), time.process_time()
        staged = self._publisher.stage(self._version, self._tensors)
        stall = time.perf_counter() - wall
        line = encode_manifest(staged.commit()).hex() + "\n"
        published = time.perf_counter() - wall
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        theirs = sum(float(_answer(process)) for process in self._processes)
        verified = time.perf_counter() - wall
        self._publisher.retire(self._version)
        return Round(stall, published, verified, time.process_time() - cpu + theirs)

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=60)
        self._publisher.close()

    def _receiver(self, link: str, place: Path, index: int) -> subprocess.Popen[str]:
        own = place / ("near" if link == "shm" else f"far{index}")
        own.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "slipstream.weights.bench", link, str(own)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(link: str, receivers: int, data: np.ndarray, repeats: int) -> Paired:
    """Rounds of one link, each with the seconds of a memcpy just before it, after some to warm up."""
    flat = data.view(np.uint8).reshape(-1)
    target = np.ones_like(flat)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slipstream-bench-") as place:
        bench = Bench(link, receivers, data, Path(place))
        try:
            rounds = [(timed(lambda: np.copyto(target, flat)), bench.round()) for _ in range(WARM_UP + repeats)]
        finally:
            bench.close()
    return rounds[WARM_UP:]


def timed(action: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def row(method: str, receivers: int, gigabytes: float, rounds: Paired) -> BenchRow:
    """Medians of the rounds of one method."""
    verified = statistics.median(each.verified for _, each in rounds)
    return BenchRow(
        method,
        receivers,
        1e3 * verified,
        receivers * gigabytes / verified,
        statistics.median(each.cpu for _, each in rounds) / gigabytes / receivers,
        statistics.median(each.stall / memcpy for memcpy, each in rounds),
        statistics.median(each.published / memcpy for memcpy, each in rounds),
    )


def receive(link: str, directory: Path) -> None:
    """A receiver: fetch each manifest given on standard input; answer with the CPU seconds that took."""
    subscriber = (
        ShmSubscriber(directory=directory)
        if link == "shm"
        else PullSubscriber([_puller(link, directory.parent)], directory=directory)
    )
    served = None
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        before = time.process_time()
        fetched = subscriber.fetch(decode_manifest(bytes.fromhex(line)))
        if served is not None:
            served.release()
        served = fetched
        print(time.process_time() - before, flush=True)  # noqa: T201
    subscriber.close()


def _keyed(link: str, place: Path) -> tuple[str, KeyPair | None]:
    """A link's transport, and the key of the bench that lies in `place`, if the link has one."""
    return link.removesuffix(KEYED), keys_of(str(place)) if link.endswith(KEYED) else None


def _puller(link: str, place: Path) -> Puller:
    scheme, keys = _keyed(link, place)
    return open_puller(scheme, SETTINGS, keys)


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError("a receiver ended; its error stands above")
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("link")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    receive(options.link, options.directory)
