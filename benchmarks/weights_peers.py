"""The usual ways for `benchmarks.weights`: plain sockets, a gloo broadcast, safetensors through a file.

Receivers are processes that answer each line on their standard input with the CPU seconds that a round took them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipstream.weights.bench import WARM_UP, Paired, Round, cut, timed

PIECES = 16
BLOCK = 1 << 20


class Receivers:
    """Receiver processes of one way."""

    def __init__(self, arguments: list[list[str]]) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weights_peers", *each],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for each in arguments
        ]

    def tell(self, line: str = "go") -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def answers(self) -> list[float]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise RuntimeError("a receiver ended; its error stands above")
        return [float(line) for line in lines]

    def close(self) -> None:
        for process in self.processes:
            process.communicate(timeout=60)


def sockets(data: np.ndarray, receivers: int, repeats: int) -> Paired:
    """Plain TCP streams, a thread for each receiver; the learner waits until all is sent."""
    flat = memoryview(data.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        peers = Receivers([["sockets", port, str(data.nbytes)]] * receivers)
        links = [server.accept()[0] for _ in range(receivers)]

        def send() -> None:
            threads = [threading.Thread(target=link.sendall, args=(flat,)) for link in links]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        try:
            return _rounds(data, repeats, peers, send)
        finally:
            peers.close()
            for link in links:
                link.close()


def gloo(data: np.ndarray, receivers: int, repeats: int) -> Paired:
    """A broadcast that all ranks take part in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = [str(receivers + 1), str(port), str(data.nbytes)]
    peers = Receivers([["gloo", str(index + 1), *shared] for index in range(receivers)])
    own = _Gloo(0, receivers + 1, port, data.nbytes)
    try:
        return _rounds(data, repeats, peers, own.broadcast)
    finally:
        peers.close()
        own.close()


def safetensors(data: np.ndarray, receivers: int, repeats: int) -> Paired:
    """A file on the disk of the temporary folder, written whole and read back whole."""
    from safetensors.numpy import save_file

    tensors = cut(data)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = Path(folder) / "weights.safetensors"
        peers = Receivers([["safetensors", str(path)]] * receivers)
        try:
            return _rounds(data, repeats, peers, lambda: save_file(tensors, path), first=True)
        finally:
            peers.close()


def _rounds(
    data: np.ndarray, repeats: int, peers: Receivers, send: Callable[[], object], first: bool = False
) -> Paired:
    """Rounds in which `send` is the learner's part; `first` when it has to be over before receivers begin."""
    target, found = np.ones_like(data), []
    peers.answers()  # each says that it is ready
    for _ in range(WARM_UP + repeats):
        memcpy = timed(lambda: np.copyto(target, data))
        wall, cpu = time.perf_counter(), time.process_time()
        if not first:
            peers.tell()
        send()
        stall = time.perf_counter() - wall
        if first:
            peers.tell()
        theirs = sum(peers.answers())
        received = time.perf_counter() - wall
        found.append((memcpy, Round(stall, stall, received, time.process_time() - cpu + theirs)))
    return found[WARM_UP:]


class _Gloo:
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


def _receive_sockets(port: str, nbytes: str) -> Callable[[], None]:
    place = memoryview(np.ones(int(nbytes), np.uint8))  # type: ignore[arg-type]
    link = socket.create_connection(("127.0.0.1", int(port)))

    def receive() -> None:
        done = 0
        while done < len(place):
            received = link.recv_into(place[done : done + BLOCK])
            if not received:
                raise ConnectionResetError("the stream ended")
            done += received

    return receive


def _receive_safetensors(path: str) -> Callable[[], None]:
    from safetensors.numpy import load_file

    held: list[dict[str, np.ndarray]] = []

    def receive() -> None:
        held[:] = [load_file(path)]

    return receive


def main() -> None:
    """A receiver: the way's name, then what it needs."""
    way, *rest = sys.argv[1:]
    if way == "gloo":
        group = _Gloo(*map(int, rest))
        receive: Callable[[], object] = group.broadcast
    else:
        receive = _receive_sockets(*rest) if way == "sockets" else _receive_safetensors(*rest)
    print(0.0, flush=True)
    for _ in sys.stdin:
        before = time.process_time()
        receive()
        print(time.process_time() - before, flush=True)
    if way == "gloo":
        group.close()


if __name__ == "__main__":
    main()
