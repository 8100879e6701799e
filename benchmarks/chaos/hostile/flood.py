"""A flood of strangers: connections without a key to every port of a process, held open while the run must go on.

A quarter say nothing, a quarter begin a ZeroMQ greeting and stop, a quarter ask for a page one letter at a time, and
a quarter send bytes that are no protocol at all.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator

import psutil

from benchmarks.chaos.hostile.found import NotNow, patiently
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack

STRANGERS = 1100  # the usual soft limit on descriptors is 1024
_GREETING = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3])
_PAGE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
_STEP_SECONDS = 120.0  # for the steps that the run makes meanwhile; other faults hurt it at the same time
_STEPS = 2
_CLOSE_AT_ONCE = struct.pack("ii", 1, 0)


def flood(stack: Stack, fault: Fault) -> list[str]:
    """Hold strangers at the ports of `fault.deed` until the run has made steps; what was wrong."""
    victim = patiently(lambda: stack.victim(fault.deed), 60.0, fault.deed)
    ports = _listening(victim)
    if not ports:
        raise NotNow(f"{fault.deed} listens nowhere yet")
    _more_descriptors(STRANGERS * len(ports))
    dice = random.Random(fault.deed)
    with contextlib.ExitStack() as held:
        crowd = [each for port in ports for each in _crowd(port, held, dice)]
        end, before = time.monotonic() + _STEP_SECONDS, stack.lines()
        least = time.monotonic() + fault.seconds
        while stack.lines() < before + _STEPS or time.monotonic() < least:
            if stack.finished():
                break
            if time.monotonic() > end:
                return [f"no {_STEPS} steps in {_STEP_SECONDS:.0f} s under {len(crowd)} strangers"]
            for link, words in crowd:
                _say(link, words)
            time.sleep(0.2)
    return []


def _listening(victim: psutil.Process) -> list[int]:
    """Every TCP port that the process listens on: data, weights, metrics."""
    try:
        found = victim.net_connections("tcp")
    except psutil.Error:
        return []
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


def _crowd(
    port: int, held: contextlib.ExitStack, dice: random.Random
) -> Iterator[tuple[socket.socket, Iterator[bytes]]]:
    for number in range(STRANGERS):
        link = socket.socket()
        held.callback(link.close)
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_AT_ONCE)
        link.connect_ex(("127.0.0.1", port))
        if number % 50 == 49:
            time.sleep(0.02)  # the backlog of a listener is bounded; strangers keep trying, and so do we
        yield link, _words(number % 4, dice)


def _words(manner: int, dice: random.Random) -> Iterator[bytes]:
    if manner == 1:
        yield _GREETING[: dice.randrange(1, len(_GREETING))]
    if manner == 2:
        yield from (bytes([letter]) for letter in _PAGE)
    if manner == 3:
        yield dice.randbytes(dice.randrange(1, 2000))


def _say(link: socket.socket, words: Iterator[bytes]) -> None:
    with contextlib.suppress(OSError):  # turned away, or not let in yet
        if word := next(words, b""):
            link.send(word)


def _more_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count
    if soft < hard and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
