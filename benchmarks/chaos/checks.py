"""What must hold after any number of faults: promises 1 to 3, 8 and 9, from the ledger and the run's folder."""

from __future__ import annotations

import asyncio
import math
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from benchmarks.chaos.hostile.programs import traces
from benchmarks.chaos.stack import EPOCHS, Stack
from slipstream.config.load import load_config
from slipstream.learner.checkpoint.finding import newest_complete
from slipstream.ledger.client import Ledger
from slipstream.ledger.counts import Audit, unmoved
from slipstream.prompts.order import EpochOrder
from slipstream.run.folder import line_of_descent, read_lines

SHM = Path("/dev/shm")
_AWAY = "the ledger did not answer"
_ENDED = re.compile(r" (\S+) ended \((exit code [1-9]\d*|signal (?!9\)|15\))\d+)\)")
_AGE = re.compile(r'slipstream_objective_trained_tokens_by_age\{age="(\d+)"\}')


def problems(stack: Stack, policy: str, eta: int) -> list[str]:
    """All that is wrong with a run that has ended; empty when every promise was kept."""
    audit = asyncio.run(_audit(stack))
    steps = line_of_descent(read_lines(stack.folder.steps))
    return [
        *audit.problems,
        *_once(stack, steps, audit),
        *_line(steps),
        *unmoved(steps),
        *_ages(steps, policy, eta),
        *_finite(steps),
        *_poisoned(stack, steps),
        *_ended(stack.text),
        *_left_behind(stack),
        *traces(stack.proofs, stack.folder.name),
    ]


async def _audit(stack: Stack) -> Audit:
    async with await Ledger.connect(stack.books().url, stack.folder.name) as ledger:
        return await ledger.audit()


def _once(stack: Stack, steps: list[dict[str, Any]], audit: Audit) -> list[str]:
    """Every ticket of every epoch was trained in one step of the line, or is listed with its reason; none in both."""
    outcomes = _outcomes(stack)
    trained = [ticket for step in steps for ticket, _ in step["tickets"]]
    found = [f"ticket {t} was trained {n} times" for t, n in Counter(trained).items() if n > 1]
    listed = [ticket for label, tickets in outcomes.items() if label != "trained" for ticket in tickets]
    if sorted(trained) != sorted(outcomes.get("trained", [])):
        odd = sorted(set(trained) ^ set(outcomes.get("trained", [])))
        found.append(f"steps and ledger disagree about what was trained: tickets {odd}")
    prompts = audit.counts.issued // EPOCHS
    if sorted(trained + listed) != list(range(EPOCHS * prompts)):
        missing = sorted(set(range(EPOCHS * prompts)) - set(trained + listed))
        found.append(f"tickets with no end, or with two: {missing}; trained and listed {len(trained + listed)}")
    seed = load_config(stack.folder.config)[0].run.seed
    order = EpochOrder(prompts, seed)
    seen = Counter(order.at(ticket) for ticket in trained + listed)
    wanted = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(prompts))
    if seen != wanted:
        found.append(f"prompts (epoch, index) too often or never: {sorted((seen - wanted) + (wanted - seen))}")
    return found


def _outcomes(stack: Stack) -> dict[str, list[int]]:
    """Tickets by their last state, from the ledger's bitmaps and records."""
    client: redis.Redis = stack.books().client
    prefix = f"slipstream:{{{stack.folder.name}}}:"
    outcomes: dict[str, list[int]] = {}
    for key in client.keys(f"{re.escape(prefix)}bits:*"):
        bits = client.get(key)
        tickets = [8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> (7 - bit) & 1]
        outcomes.setdefault(key.decode().removeprefix(f"{prefix}bits:"), []).extend(tickets)
    for number in client.zrange(f"{prefix}records", 0, -1):
        record = client.hgetall(f"{prefix}t:{number.decode()}")
        outcomes.setdefault(record[b"state"].decode(), []).append(int(number))
    return outcomes


def _line(steps: list[dict[str, Any]]) -> list[str]:
    versions = [step["version"] for step in steps]
    found = [] if versions == sorted(versions) else ["versions went back"]
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        found.append(f"steps are not 1 to {len(steps)}: {[step['step'] for step in steps]}")
    return found


def _ages(steps: list[dict[str, Any]], policy: str, eta: int) -> list[str]:
    if policy == "pace":
        return []
    found = []
    for step in steps:
        for name, tokens in step["metrics"].items():
            match = _AGE.fullmatch(name)
            if match and tokens and int(match[1]) > eta:
                found.append(f"step {step['step']}: {tokens} tokens of age {match[1]} had weight, eta is {eta}")
        if policy == "drop" and step["age_max"] > eta:
            found.append(f"step {step['step']}: a group of age {step['age_max']} under `drop`, eta is {eta}")
    return found


def _poisoned(stack: Stack, steps: list[dict[str, Any]]) -> list[str]:
    """Groups that were changed in the buffer's file, and trained on as if they were whole."""
    trained = {(ticket, attempt) for step in steps for ticket, attempt in step["tickets"]}
    return [f"poisoned group was trained: ticket {n} attempt {a}" for n, a in sorted(trained & stack.poisoned)]


def _ended(text: str) -> list[str]:
    """Processes that ended for something else than a signal, being asked to, or a ledger that was away for as long as
    they wait for it; each with what it said last."""
    lines, found = text.splitlines(), []
    for place, line in enumerate(lines):
        if match := _ENDED.search(line):
            words = f"{match[1]} "
            said = [each for each in lines[max(0, place - 200) : place] if words in each and "ERROR" in each]
            last = said[-1] if said else "without a word"
            if _AWAY not in last:
                found.append(f"{match[1]} ended with {match[2]}: {last}")
    return found


def _finite(steps: list[dict[str, Any]]) -> list[str]:
    return [
        f"step {step['step']}: {name} is {value}"
        for step in steps
        for name, value in {**step, **step["metrics"]}.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _left_behind(stack: Stack) -> list[str]:
    """Processes, shared memory, held locks, and saves that were not cleared away."""
    found = [f"process {each} is left" for each in stack.left()]
    found += [f"{path} is left" for path in SHM.glob(f"slipstream*{stack.folder.name}*")]
    with stack.folder.held():  # raises when somebody holds it
        pass
    for path in (stack.folder.path / "buffer").glob("*.sqlite"):
        with sqlite3.connect(path, timeout=1.0) as store:
            store.execute("BEGIN EXCLUSIVE")
            store.execute("ROLLBACK")
            if found_bad := store.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                found.append(f"{path}: {found_bad}")
        store.close()
    checkpoint = newest_complete(stack.folder.checkpoints)
    if checkpoint.path is None or checkpoint.skipped:
        found.append(f"checkpoints: newest {checkpoint.path}, skipped {checkpoint.skipped}")
    return found
