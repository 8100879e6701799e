"""Real processes that are killed, stopped and interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from slipstream.transport.base import Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.zeromq import zmq as queues

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
FAST = SenderOptions(ping_seconds=0.1, suspect_pings=10)
PATIENCE = 200.0

RELAY = """
import asyncio, sys
from slipstream.transport.base import Peer, ReceiverOptions, SenderOptions
from slipstream.transport.zeromq.zmq import make_receiver, make_sender

async def main(buffer):
    async with make_receiver(ReceiverOptions(credits=16)) as receiver, make_sender(SenderOptions()) as sender:
        sender.set_peers({"buffer": Peer(buffer)})
        print(receiver.endpoint, flush=True)
        async def pass_on(delivery):
            await delivery.reply(await sender.deliver(delivery.parcel, 200))
        async with asyncio.TaskGroup() as tasks:
            async for delivery in receiver:
                tasks.create_task(pass_on(delivery))

asyncio.run(main(sys.argv[1]))
"""

LONELY = """
import asyncio
from slipstream.transport.base import Parcel, SenderOptions
from slipstream.transport.zeromq.zmq import make_sender

async def main():
    async with make_sender(SenderOptions()) as sender:
        sent = asyncio.create_task(sender.deliver(Parcel("g", "group"), 600))
        await asyncio.sleep(0)
        print(sender.stats().waiting, sender.stats().ready, flush=True)
        await sent

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(script: str, *args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A child running the script, with the first line that it printed; killed at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


async def store(receiver, seen, arrived):
    """A buffer that keeps each parcel and rings after each."""
    async for delivery in receiver:
        seen.append(delivery.parcel.id)
        arrived.set()
        await delivery.reply(Reply("ok"))


async def test_nothing_is_lost_when_the_relay_is_killed_five_times():
    """Case 91: kill -9 of the service in the middle, five times in 500 samples."""
    count, seen, arrived = 500, [], asyncio.Event()
    async with queues.make_receiver(ReceiverOptions()) as buffer, queues.make_sender(FAST) as sender:
        storing = asyncio.create_task(store(buffer, seen, arrived))
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "group"), PATIENCE)) for n in range(count)]
        for life in range(6):
            async with process(RELAY, buffer.endpoint) as (child, endpoint):
                sender.set_peers({"reward": Peer(endpoint, incarnation=str(life))})
                while life < 5 and len(seen) < (life + 1) * 80:
                    arrived.clear()
                    await arrived.wait()
                if life < 5:
                    child.kill()
                    await child.wait()
                else:
                    replies = await asyncio.gather(*sent)
        assert {reply.status for reply in replies} == {"ok"}
        assert sender.stats().resends > 0
        storing.cancel()
    # a new process is another sender: what the killed one had in hand may come twice, for the store to recognise
    assert set(seen) == {f"p{n}" for n in range(count)}
    assert len(seen) <= count + 5 * 16


async def test_a_stopped_process_is_noticed_by_the_link_alone():
    """SIGSTOP leaves the connection up; only unanswered pings tell."""
    seen, arrived = [], asyncio.Event()
    async with queues.make_receiver(ReceiverOptions()) as buffer, queues.make_sender(FAST) as sender:
        storing = asyncio.create_task(store(buffer, seen, arrived))
        async with (
            process(RELAY, buffer.endpoint) as (one, here),
            process(RELAY, buffer.endpoint) as (_, there),
        ):
            sender.set_peers({"one": Peer(here)})
            await sender.deliver(Parcel("first", "group"), PATIENCE)
            os.kill(one.pid, signal.SIGSTOP)
            sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "group"), PATIENCE)) for n in range(10)]
            await asyncio.sleep(0)
            assert sender.stats().in_flight + sender.stats().waiting == 10
            sender.set_peers({"one": Peer(here), "two": Peer(there)})
            await asyncio.gather(*sent)
            assert sender.stats().peers["one"].state == "suspect"
        storing.cancel()
    assert set(seen) == {"first", *(f"p{n}" for n in range(10))}


async def test_a_sender_without_a_consumer_can_be_interrupted():
    """Case 92: no consumer, readiness is false, the parcel shows as waiting, and Ctrl-C works."""
    async with process(LONELY) as (child, line):
        assert line == "1 False"
        child.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE):
            _, errors = await child.communicate()
        assert b"KeyboardInterrupt" in errors
        assert child.returncode in (1, 130, -signal.SIGINT)
