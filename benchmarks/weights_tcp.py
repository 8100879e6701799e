"""Weights between hosts: our TCP transport against a gloo broadcast of the same bytes, to one and three receivers.

    python -m benchmarks.weights_tcp [--quick]

Everything runs over loopback on this machine, so receivers compete with the sender for its cores. A round of ours
ends when every receiver has the version in its own shared memory and has verified each digest; gloo verifies
nothing and needs all receivers to take part. gloo broadcasts 16 pieces at once, its fastest form. Receivers are
processes; the methods take turns, times are medians and ratios are medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from slipstream.weights.base import ArraySource
from slipstream.weights.manifest import Manifest, decode_manifest, encode_manifest, layout
from slipstream.weights.pulling import PullSubscriber
from slipstream.weights.serving import ServingPublisher
from slipstream.weights.shelf import Shelf
from slipstream.weights.shm import ShmPublisher
from slipstream.weights.stream_server import StreamServer
from slipstream.weights.tcp_pull import TcpPuller

PIECES = 16
RECEIVERS = (1, 3)
AIMS = {"tcp_of_gloo_x1": ">= 1.0", "tcp_of_gloo_x3": ">= 1.0"}

Timing = tuple[float, float]  # wall seconds, CPU seconds of all processes


def tcp_receiver(directory: Path) -> None:
    """Fetch each manifest given on standard input; answer with the CPU seconds it took."""
    subscriber, served = PullSubscriber([TcpPuller()], directory=directory), None
    for line in sys.stdin:
        before = time.process_time()
        fetched = subscriber.fetch(decode_manifest(bytes.fromhex(line)))
        if served is not None:
            served.release()
        served = fetched
        print(time.process_time() - before, flush=True)
    subscriber.close()


class GlooRank:
    """One rank of a group that broadcasts a flat float32 tensor from rank 0."""

    def __init__(self, rank: int, world: int, port: int, nbytes: int) -> None:
        import torch
        import torch.distributed as dist

        self._dist = dist
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        self._pieces = list(torch.ones(nbytes // 4).chunk(PIECES))

    def broadcast(self) -> None:
        for work in [self._dist.broadcast(piece, 0, async_op=True) for piece in self._pieces]:
            work.wait()

    def close(self) -> None:
        self._dist.destroy_process_group()


def gloo_receiver(rank: int, world: int, port: int, nbytes: int) -> None:
    """Take part in one broadcast for each line on standard input; answer with the CPU seconds it took."""
    group = GlooRank(rank, world, port, nbytes)
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.process_time()
        group.broadcast()
        print(time.process_time() - before, flush=True)
    group.close()


class Receivers:
    """Receiver processes that answer each line with a line."""

    def __init__(self, count: int, arguments: list[list[str]]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weights_tcp", *arguments[index]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]

    def tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def answers(self) -> list[str]:
        return [process.stdout.readline() for process in self._processes if process.stdout]

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=20)


class Tcp:
    """Our publisher, serving `count` receivers."""

    def __init__(self, data: np.ndarray, count: int, directory: Path) -> None:
        self._tensors, self._version = {"w": ArraySource(data)}, 0
        shm = ShmPublisher("benchmark", count, layout(self._tensors), directory=directory)
        shelf = Shelf(directory)
        self._publisher = ServingPublisher(shm, shelf, [StreamServer(shelf)])
        self._receivers = Receivers(count, [["--tcp-receiver", str(directory)]] * count)

    def prepare(self) -> Manifest:
        self._version += 1
        self._publisher.retire(self._version - 1)
        return self._publisher.publish(self._version, self._tensors)

    def round(self) -> Timing:
        manifest = self.prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        self._receivers.tell(encode_manifest(manifest).hex())
        theirs = sum(map(float, self._receivers.answers()))
        return time.perf_counter() - wall, time.process_time() - cpu + theirs

    def close(self) -> None:
        self._receivers.close()
        self._publisher.close()


class Gloo:
    """A gloo group with `count` receivers; this process holds one rank at a time, so make one after another."""

    def __init__(self, nbytes: int, count: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = [str(count + 1), str(port), str(nbytes)]
        self._receivers = Receivers(count, [["--gloo-receiver", str(i + 1), *shared] for i in range(count)])
        self._own = GlooRank(0, count + 1, port, nbytes)
        self._receivers.answers()

    def round(self) -> Timing:
        wall, cpu = time.perf_counter(), time.process_time()
        self._receivers.tell("go")
        self._own.broadcast()
        theirs = sum(map(float, self._receivers.answers()))
        return time.perf_counter() - wall, time.process_time() - cpu + theirs

    def close(self) -> None:
        self._receivers.close()
        self._own.close()


def measure(data: np.ndarray, count: int, repeats: int, directory: Path) -> tuple[list[Timing], list[Timing]]:
    """Rounds of ours and of gloo to `count` receivers, in turn, after two to warm up."""
    ours, gloo = Tcp(data, count, directory), Gloo(data.nbytes, count)
    try:
        rounds = [(ours.round(), gloo.round()) for _ in range(repeats + 2)][2:]
    finally:
        gloo.close()
        ours.close()
    return [pair[0] for pair in rounds], [pair[1] for pair in rounds]


def report(gigabytes: float, directory: Path, data: np.ndarray, repeats: int) -> dict[str, float]:
    figures = {"gigabytes": gigabytes}
    print(f"{gigabytes:.3f} GB; GB/s counts delivered bytes, CPU seconds are per GB delivered")
    print(f"{'':10} {'ms':>8} {'GB/s':>7} {'CPU s/GB':>9}")
    for count in RECEIVERS:
        ours, gloo = measure(data, count, repeats, directory)
        for name, rounds in (("tcp", ours), ("gloo", gloo)):
            wall = statistics.median(timing[0] for timing in rounds)
            cpu = statistics.median(timing[1] for timing in rounds) / gigabytes / count
            print(f"{name} x{count:<6} {wall * 1e3:8.1f} {count * gigabytes / wall:7.2f} {cpu:9.3f}")
            figures[f"{name}_x{count}_gb_per_s"] = count * gigabytes / wall
            figures[f"{name}_x{count}_cpu_s_per_gb"] = cpu
        ratios = [theirs[0] / mine[0] for mine, theirs in zip(ours, gloo, strict=True)]
        figures[f"tcp_of_gloo_x{count}"] = statistics.median(ratios)
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 MiB instead of 512")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tcp-receiver", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gloo-receiver", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tcp_receiver:
        tcp_receiver(options.tcp_receiver)
    elif options.gloo_receiver:
        gloo_receiver(*options.gloo_receiver)
    else:
        data = np.ones(((128 if options.quick else 512) << 8, 1024), np.float32)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slipstream-benchmark-") as directory:
            figures = report(data.nbytes / 1e9, Path(directory), data, options.repeats)
        print(json.dumps({"benchmark": "weights_tcp", "figures": figures, "aims": AIMS}))


if __name__ == "__main__":
    main()
