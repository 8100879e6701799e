"""Hostile completions: programs that attack whoever runs them, in a group like any other.

Each program that gets at what it must not leaves a proof, where only a program without walls could write it, or a
process with a mark in its command line; both are looked for when the run is over.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from benchmarks.chaos.hostile.forging import forged
from benchmarks.chaos.hostile.found import NotNow, patiently
from benchmarks.chaos.hostile.member import honest, joined
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack
from slipstream.transport.base import OK

_HEAD = """
import contextlib, glob, os, resource, signal, socket, subprocess, sys, time
PROOFS, MARK, SOCKET, PORT, FOLDER, REWARD = {facts!r}
def proof(name):
    with contextlib.suppress(OSError):
        open(os.path.join(PROOFS, name), "w").write("here")
"""
ATTACKS = {
    "ledger": """
for family, place in ((socket.AF_UNIX, SOCKET), (socket.AF_INET, ("127.0.0.1", PORT))):
    with contextlib.suppress(OSError, TypeError):
        link = socket.socket(family)
        link.settimeout(2)
        link.connect(place)
        proof("ledger")
        link.sendall(b"FLUSHALL\\r\\n")
        link.recv(100)
""",
    "secrets": """
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
        if b"slipstream" in open(path, "rb").read():
            proof("proc")
with contextlib.suppress(OSError):
    open(os.path.join(FOLDER, "keys", "curve.key")).read()
    proof("key")
with contextlib.suppress(OSError):
    open(os.path.join(FOLDER, "hostile"), "w").write("here")
    proof("folder")
""",
    "escape": """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", MARK])
        os._exit(0)
""",
    "fork": """
for _ in range(400):
    with contextlib.suppress(OSError):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", MARK])
""",
    "memory": """
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(150 << 20)
        held[::4096] = b"x" * len(held[::4096])
        time.sleep(30)
        os._exit(0)
held = [bytearray(100 << 20) for _ in range(10)]
""",
    "signals": """
for pid in (REWARD, os.getppid()):
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
""",
    "descriptors": """
for descriptor in range(3, 256):
    with contextlib.suppress(OSError):
        os.write(descriptor, b'\\xff\\xff\\xff\\x7f{"status": "ok", "token": ""}\\n' * 10)
""",
    "disk": """
for place in ("/tmp", ".", "/dev/shm", PROOFS, FOLDER):
    with contextlib.suppress(OSError):
        with open(os.path.join(place, "filler-" + MARK), "wb") as file:
            for _ in range(200):
                file.write(b"x" * (1 << 20))
while True:
    print("x" * (1 << 16))
""",
}
MARK = "chaos-hostile"


def submit(stack: Stack, fault: Fault) -> list[str]:
    """Have the program scored, as a generator whose model wrote it would."""
    return asyncio.run(_submit(stack, text_of(stack, fault.deed)))


def text_of(stack: Stack, name: str) -> str:
    """The completion."""
    reward = patiently(lambda: stack.victim("reward-0"), 60.0, "reward-0")
    mark = f"{MARK}-{stack.folder.name}"
    where = stack.server.url.removeprefix("unix://")
    facts = (str(stack.proofs), mark, where, stack.ledger_port, str(stack.folder.path.absolute()), reward.pid)
    return f"I attack.\n```python\n{_HEAD.format(facts=facts)}{ATTACKS[name]}\n```\n"


async def _submit(stack: Stack, text: str) -> list[str]:
    async with joined(stack) as member:
        ticket = await member.ticket()
        group, arrays = honest(member, ticket.number, ticket.attempt, ticket.admitted_version)
        group.samples[0].text = text
        parcel = f"t{ticket.number}.{ticket.attempt}"
        reply = await member.send("reward", "group", forged(group, arrays), parcel)
        if reply.status != OK:
            raise NotNow(f"its group was answered {reply.status}: {reply.reason}")
    return []


def traces(proofs: Path, run: str) -> list[str]:
    """What programs got at, and what of them still runs."""
    found = [f"a program got through: {path.name}" for path in sorted(proofs.iterdir())]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{MARK}-{run}".encode() in words and int(process.name) != os.getpid():
            found.append(f"a program's process {process.name} runs on")
    return found
