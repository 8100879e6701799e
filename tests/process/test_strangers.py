"""What strangers send to a running stack: without the run's key nothing counts, with it only what makes sense.

100,000 random and mutated messages go to every data socket of a stack with a simulated engine, whose weights travel
over TCP. The seed is printed; the same seed sends the same messages.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import urllib.request
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from slipstream.ledger.client import Ledger
from slipstream.protocol.messages import Group, GroupArrays, Sample, encode_group
from slipstream.protocol.questions import Fetch, Offer
from slipstream.run.folder import RunFolder
from slipstream.transport import queue_messages as wire
from slipstream.transport.zeromq import keys
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest
from slipstream.weights.manifest import decode_manifest

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Destroying context with unclosed socket:ResourceWarning"),
]

MESSAGES = int(os.environ.get("SLIPSTREAM_FUZZ_MESSAGES", "100000"))
SEED = int(os.environ.get("SLIPSTREAM_FUZZ_SEED", "7"))
NEVER = 2**62  # a ticket that is never issued: a mutation of it is no ticket of the run either
ANSWER_MS = 60_000


class Noise:
    """Messages that are nearly right, and some that are nowhere near."""

    def __init__(self, seed: int, run: str) -> None:
        self.dice = random.Random(seed)
        encode = msgspec.msgpack.encode
        group = encode_group(
            Group(
                run=run,
                ticket=NEVER,
                attempt=NEVER,
                prompt_index=0,
                owner="rollout-0",
                admitted_version=0,
                samples=[Sample(tokens=2, finish="stop", versions=[(0, 2)], text="1 2", reward=1.0)] * 4,
            ),
            GroupArrays(
                prompt_ids=np.ones(3, np.int32),
                token_ids=np.ones(8, np.int32),
                logprobs=np.full(8, -1.0, np.float32),
            ),
        )
        bodies = [
            ("group", [bytes(frame) for frame in group]),
            ("offer", [encode(Offer(run=run, learner="nobody", changed=[NEVER]))]),
            ("fetch", [encode(Fetch(run=run, learner="nobody", tickets=[NEVER, 1, 2]))]),
        ]
        self.bodies = bodies + [(kind, frames) for kind, frames in bodies for _ in range(1)]
        self.chunk = encode(ChunkRequest(run=run, incarnation=1, version=NEVER, offset=0, length=1))
        self.number = 0

    def messages(self, count: int) -> Iterator[list[bytes]]:
        for _ in range(count):
            yield self._one()

    def _one(self) -> list[bytes]:
        dice, self.number = self.dice, self.number + 1
        form = dice.random()
        if form < 0.35:
            return [dice.randbytes(dice.randrange(0, 80)) for _ in range(dice.randrange(1, 6))]
        kind, body = dice.choice(self.bodies)
        if form < 0.45:
            header = wire.encode(wire.Ping(sent=dice.randrange(2**40), window=dice.randrange(64)))
            return [self._mutated(header)]
        header = wire.encode(wire.Deliver(seq=self.number, id=f"n{dice.randrange(2**60)}", kind=kind))
        if form < 0.70:  # a header that is broken
            return [self._mutated(header), *body]
        if form < 0.98:  # a body that is
            place = dice.randrange(len(body))
            return [header, *body[:place], self._mutated(body[place]), *body[place + 1 :]]
        if form < 0.99:
            return [header, *body[: dice.randrange(len(body))]]
        return [dice.randbytes(70_000), *body] if form < 0.9905 else [self.chunk]

    def _mutated(self, frame: bytes) -> bytes:
        data, dice = bytearray(frame), self.dice
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(data) + 1)
            act = dice.randrange(3)
            if act == 0 and at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            elif act == 1:
                del data[at : at + dice.randrange(1, 9)]
            else:
                data[at:at] = dice.randbytes(dice.randrange(1, 5))
        return bytes(data)


class Client:
    """A DEALER with the run's key, with another one, or with none."""

    def __init__(self, context: zmq.Context, endpoint: str, own: keys.KeyPair | None, server: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if own is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self.socket.connect(endpoint)
        self.endpoint, self.answers = endpoint, 0

    def send(self, frames: list[bytes]) -> None:
        """Send once there is room; answers are read all the while, as an honest client does."""
        ready = 0
        while not ready & zmq.POLLOUT:
            ready = self.socket.poll(ANSWER_MS, zmq.POLLIN | zmq.POLLOUT)
            assert ready, f"{self.endpoint} reads no more"
            while self.socket.poll(0):
                self.socket.recv_multipart()
                self.answers += 1
        self.socket.send_multipart(frames)

    def ping(self, wait_ms: int = ANSWER_MS) -> bool:
        """Whether a question that makes sense is answered; what was sent before it has then been read."""
        try:
            self.socket.send_multipart([wire.encode(wire.Ping(sent=0, window=1234))], zmq.NOBLOCK)
        except zmq.Again:  # turned away at the door
            return False
        while self.socket.poll(wait_ms):
            answer = self.socket.recv_multipart()
            try:
                if isinstance(wire.decode_downward(answer), wire.Status):
                    return True
            except Exception:  # noqa: BLE001  (an answer to the noise)
                continue
        return False


async def _look(url: str, name: str):
    async with await Ledger.connect(url, name, deadline=30.0) as ledger:
        return await ledger.members(), await ledger.manifest(), await ledger.counts()


def metric(port: int, name: str) -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def raw_noise(endpoint: str, dice: random.Random, count: int) -> None:
    """Bytes that are no ZeroMQ at all; the other side hangs up."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=30) as link:
            try:
                link.sendall(dice.randbytes(dice.randrange(1, 2000)))
            except OSError:
                continue


def test_strangers_get_nothing_change_nothing_and_stop_nothing(stack, simulated):
    """Promise 9."""
    run = stack().up(*simulated, "run.steps=100000", "weights.transport=tcp", "staleness.max_staleness=2")
    run.until_step(2, 200)
    folder = RunFolder(run.root, run.name)
    path = folder.keys / keys.FILE
    own = keys.load(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    members, manifest, _ = asyncio.run(_look(folder.live_url, run.name))
    ports = {member.role: member.metrics_port for member in members}
    sockets = {member.role: member.endpoint for member in members if member.endpoint}
    weights = [decode_manifest(manifest[1]).locations["tcp"]]
    assert set(sockets) == {"reward", "buffer"}
    assert weights[0].startswith("tcp://"), "the weights are not served over ZeroMQ with CURVE"
    pids = {process.pid for process in run.look()}

    print(f"seed {SEED}")
    context = zmq.Context()
    try:
        no_key(context, sockets, weights, own, ports)
        with_key(context, sockets, weights, own, run.name)
    except AssertionError:
        print(sockets, weights, *(line for line in run.text.splitlines() if " step " not in line), sep="\n")
        raise
    finally:
        context.destroy(linger=0)

    for role in ("reward", "buffer"):
        assert metric(ports[role], "slipstream_inbox_refused_total") > MESSAGES / 20
    reached = run.steps()[-1]["step"]
    run.until_step(reached + 3, 200)
    assert pids <= {process.pid for process in run.look()}  # nobody died of it
    assert "Traceback" not in run.text
    run.process.terminate()
    assert run.wait(300) == 0, run.text
    assert "the equation holds" in run.audit()
    run.assert_exactly_once()
    no_secret(run, own.secret)
    run.assert_gone()


def no_key(context, sockets, weights, own, ports) -> None:
    """Without the key, and with a wrong one, nobody is answered; the attempt is counted."""
    before = {role: metric(ports[role], "slipstream_inbox_refused_total") for role in sockets}
    wrong = keys.generate()
    strangers = [
        Client(context, endpoint, key, own.public)
        for endpoint in [*sockets.values(), *weights]
        for key in (None, wrong)
    ]
    noise = random.Random(SEED)
    for endpoint in [*sockets.values(), *weights, *(f"tcp://127.0.0.1:{port}" for port in ports.values())]:
        raw_noise(endpoint, noise, 50)
    assert not any(stranger.ping(1000) for stranger in strangers)
    for stranger in strangers:
        stranger.socket.close()
    for role in sockets:
        assert metric(ports[role], "slipstream_inbox_refused_total") > before[role]


def with_key(context, sockets, weights, own, name) -> None:
    """A holder of the key that sends nonsense is refused, and the services go on."""
    noise = Noise(SEED, name)
    clients = [Client(context, endpoint, own, own.public) for endpoint in [*sockets.values(), *weights]]
    for number, frames in enumerate(noise.messages(MESSAGES)):
        clients[number % len(clients)].send(frames)
    for client in clients[: len(sockets)]:
        assert client.ping()
        assert client.answers
    for client in clients:
        client.socket.close()


def no_secret(run, secret: str) -> None:
    """The secret stands in the key's file and nowhere else: no log, no config, no environment that is shown."""
    assert secret not in run.text
    for path in run.folder.rglob("*"):
        if path.is_file() and path.name != keys.FILE:
            assert secret.encode() not in path.read_bytes(), path
    ours = [process for process in psutil.process_iter() if process.pid in run.seen]
    assert all(secret not in " ".join(process.cmdline()) for process in ours)
