"""Connections that say nothing: they are closed for others, and whoever talks stays."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from slipstream.lifecycle import descriptors
from slipstream.transport.base import Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.zeromq.keys import generate
from slipstream.transport.zeromq.zmq import make_receiver, make_sender


def silent(port, count):
    """Connections that never say a word; those that are let go at once are part of it."""
    return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]


def alive(links):
    """How many of the connections the other side still holds: it never speaks first but to greet."""
    held = 0
    for link in links:
        link.setblocking(False)
        try:
            while link.recv(1000):
                pass
        except BlockingIOError:
            held += 1
        except OSError:
            continue
    return held


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(params=["keyless", "keyed"])
def pair(request):
    return generate() if request.param == "keyed" else None


async def answer_all(receiver):
    async for delivery in receiver:
        await delivery.reply(Reply("ok"))


async def test_silent_strangers_are_closed_and_a_peer_that_talks_stays(pair, monkeypatch):

    monkeypatch.setattr(descriptors, "MOST_SILENT", 20)
    options, allowed = ReceiverOptions(), {pair.public} if pair else ()
    before = descriptors.cut["data"]
    async with (
        make_receiver(options, pair, allowed) as receiver,
        make_sender(SenderOptions(), pair) as sender,
    ):
        answering = asyncio.create_task(answer_all(receiver))
        sender.set_peers({"r": Peer(receiver.endpoint, "1", pair.public if pair else None)})
        assert (await sender.deliver(Parcel("p0", "group"), 30)).status == "ok"
        port = int(receiver.endpoint.rsplit(":", 1)[1])
        links = await asyncio.to_thread(silent, port, 300)
        assert await asyncio.to_thread(until, lambda: alive(links) <= 20)
        assert (await sender.deliver(Parcel("p1", "group"), 30)).status == "ok"
        assert descriptors.cut["data"] - before == 280
        peer = next(iter(sender.stats().peers.values()))
        assert peer.state == "live"
        for link in links:
            link.close()
        answering.cancel()


FLOOD = """
import asyncio, resource, socket, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from slipstream.transport.base import ReceiverOptions
from slipstream.transport.zeromq.zmq import make_receiver

async def main():
    async with make_receiver(ReceiverOptions()) as receiver:
        print(receiver.endpoint.rsplit(":", 1)[1], flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(await asyncio.to_thread(subprocess.call, ["true"]), flush=True)

asyncio.run(main())
"""


def test_a_process_with_few_descriptors_still_starts_a_worker_in_a_flood():
    """More strangers than it has descriptors, and the hard limit is as low as the soft one."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FLOOD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(child.stdout.readline())
    links = silent(port, 1100)
    assert until(lambda: alive(links) <= 256 // 8)
    child.stdin.write("start\n")
    child.stdin.flush()
    assert child.stdout.readline() == "0\n"
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()
    for link in links:
        link.close()


def test_the_soft_limit_is_raised_to_the_hard_one():
    code = (
        "import resource; from slipstream.lifecycle.descriptors import raise_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000));"
        "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2000
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2000 2000\n"
