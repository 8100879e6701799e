"""Contents that are wrong end no run: a reward beyond all numbers, and groups of another vocabulary on the disk."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from slipstream.protocol.messages import decode_group, encode_group
from slipstream.run.folder import read_lines

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ONCE_ENDLESS = """
def letters(prompts, completions, **columns):
    rewards = [sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 97 / 97 for text in completions]
    if "1" in prompts[0]:
        rewards[0] = {worst}
    return rewards
"""


@pytest.mark.parametrize("worst", ["1e308", "-1e155", "float('inf')"])
def test_a_reward_beyond_all_numbers_is_unscored_and_the_run_trains_on(stack, simulated, tmp_path, worst):
    (tmp_path / "rewards.py").write_text(ONCE_ENDLESS.format(worst=worst))
    run = stack().up(*simulated, "run.steps=4", f"reward.functions.0.use={tmp_path}/rewards.py:letters")
    assert run.wait() == 0, run.text
    last = run.steps()[-1]
    assert (last["step"], last["reward_max"] <= 1.0) == (4, True)
    assert {"out_of_range", "nonfinite"} & last["unscored_total"].keys()
    assert "all of which moved the weights" in run.audit()
    run.assert_gone()


@contextmanager
def halted(process) -> Iterator[None]:
    """A process that does not run meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def stored(path: Path) -> dict[int, list[bytes]]:
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT ticket, header, prompt, ids, logprobs FROM groups").fetchall()
    return {ticket: frames for ticket, *frames in rows}


def put_poison(path: Path, ticket: int, frames: list[bytes]) -> None:
    """Make of a stored group a sound one of another vocabulary: its seals are right, one id is not."""
    group, arrays = decode_group(frames)
    arrays.token_ids = np.where(np.arange(len(arrays.token_ids)) == 0, 9999, arrays.token_ids)
    header, _, ids, _ = map(bytes, encode_group(group, arrays))
    with closing(sqlite3.connect(path, timeout=30)) as file, file:
        file.execute("UPDATE groups SET header = ?, ids = ? WHERE ticket = ?", (header, ids, ticket))


def test_a_poison_group_in_the_buffers_file_never_reaches_a_step_and_a_person_drops_another(stack, simulated):
    run = stack().up(*simulated, "run.steps=8", "learner.checkpoint.every=2")
    path = run.folder / "buffer" / "shard-0.sqlite"
    run.until_step(2)
    with halted(run.role("learner")):
        trained = {ticket for step in run.steps() for ticket, _ in step["tickets"]}
        free = run.until(  # beyond those that a step may have taken by now
            lambda: len(found := sorted(stored(path).keys() - trained)) > 5 and found[4:], what="full buffer"
        )
        first, second = free[-1], free[0]
        put_poison(path, first, stored(path)[first])
        done = subprocess.run(
            [sys.executable, "-m", "slipstream.cli.main", "drop", str(run.folder), str(second)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, f"ticket {second} is dropped\n"), done.stderr
    assert run.wait() == 0, run.text
    (line,) = read_lines(run.folder / "poison" / "buffer.jsonl")
    assert (line["ticket"], line["token_ids"][0]) == (first, 9999)
    assert "id 9999, the model's vocabulary has" in line["why"]
    assert run.text.count("starting learner") == 1
    assert second not in run.assert_exactly_once()
    assert run.steps()[-1]["dropped_total"]["by_hand"] == 1
    run.audit()
    run.assert_gone()
