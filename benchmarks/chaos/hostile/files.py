"""Poison in the buffer's own file: a stored group changed on the disk, behind the buffer's back.

The learner is stopped until a group lies there that no step has taken; afterwards no step may have trained on that
attempt of the ticket.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.chaos.hostile.forging import forged
from benchmarks.chaos.hostile.found import patiently, tickets
from benchmarks.chaos.hostile.groups import FAR
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack
from slipstream.protocol.messages import Group, GroupArrays, decode_group

Frames = list[bytes]
_STOP_SECONDS = 8.0  # less than a lease


def poison(stack: Stack, fault: Fault) -> list[str]:
    """Change one stored group; nothing is wrong yet."""
    with _stopped(stack):
        number, attempt = patiently(lambda: _spoil(stack, POISONS[fault.deed]), _STOP_SECONDS, "stored group")
        stack.poisoned.add((number, attempt))
    return []


@contextlib.contextmanager
def _stopped(stack: Stack) -> Iterator[None]:
    """While it sleeps, groups gather."""
    learner = patiently(lambda: stack.victim("learner"), 60.0, "learner")
    with contextlib.suppress(psutil.NoSuchProcess):
        learner.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            learner.send_signal(signal.SIGCONT)


def _spoil(stack: Stack, change: Callable[[Frames], Frames]) -> tuple[int, int] | None:
    """The ticket and the attempt that were changed, when one waits in the file and in no step."""
    for number, attempt, _ in tickets(stack, "buffered"):
        if (number, attempt) not in stack.poisoned and _rewrite(
            stack.folder.buffer(0), number, attempt, change
        ):
            return number, attempt
    return None


def _rewrite(path: Path, number: int, attempt: int, change: Callable[[Frames], Frames]) -> bool:
    if not path.exists():
        return False
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as store:
        try:
            store.execute("BEGIN IMMEDIATE")
            where = (number, attempt)
            query = "SELECT header, prompt, ids, logprobs FROM groups WHERE ticket = ? AND attempt = ?"
            row = store.execute(query, where).fetchone()
            if row is not None:
                sets = (
                    "UPDATE groups SET header=?, prompt=?, ids=?, logprobs=? WHERE ticket = ? AND attempt = ?"
                )
                store.execute(sets, (*change(list(row)), *where))
            store.execute("COMMIT")
        except sqlite3.Error as error:
            raise OSError(f"{path}: {error}") from error
        return row is not None


def _bits(frames: Frames) -> Frames:
    """One bit of an id and one of a logprob: 7 becomes 6, -1.5 becomes +1.5."""
    header, prompt, ids, logprobs = (bytearray(frame) for frame in frames)
    ids[0] ^= 1
    logprobs[3] ^= 0x80
    return [bytes(header), bytes(prompt), bytes(ids), bytes(logprobs)]


def _unread(frames: Frames) -> Frames:
    return [frames[0][: len(frames[0]) // 2], *frames[1:]]


def _forged(change: Callable[[Group, GroupArrays], None]) -> Callable[[Frames], Frames]:
    """Changed and sealed again by somebody who knows how."""

    def changed(frames: Frames) -> Frames:
        group, arrays = decode_group(frames)
        copies = GroupArrays(
            prompt_ids=arrays.prompt_ids.copy(),
            token_ids=arrays.token_ids.copy(),
            logprobs=arrays.logprobs.copy(),
        )
        change(group, copies)
        return forged(group, copies)

    return changed


def _vocabulary(group: Group, arrays: GroupArrays) -> None:
    arrays.token_ids[0] = FAR


def _prompt(group: Group, arrays: GroupArrays) -> None:
    arrays.prompt_ids = arrays.prompt_ids[:0]


def _reward(group: Group, arrays: GroupArrays) -> None:
    for number, sample in enumerate(group.samples):
        sample.reward = 1e30 if number % 2 else 0.0


POISONS: dict[str, Callable[[Frames], Frames]] = {
    "bits": _bits,
    "header": _unread,
    "id": _forged(_vocabulary),
    "no_prompt": _forged(_prompt),
    "huge": _forged(_reward),
}
