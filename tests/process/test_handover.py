"""A replica that is asked to end: what it was sampling is finished by another, and nothing is sampled twice."""

from __future__ import annotations

import re
import signal
import sqlite3
from contextlib import closing

import pytest

from slipstream.protocol.messages import Group, decode_header

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LONG = [
    "rollout.replicas=2",
    "rollout.engine.options.step_seconds=0.3",  # a group takes two seconds, in which there are several steps
    "rollout.engine.options.sigma=0.2",
    "rollout.engine.max_sequences=8",  # two groups a replica, fewer than may be open: both have always something
    "supervisor.drain_seconds=30",
    "learner.checkpoint.every=1000",  # so that the buffer keeps what it had
]


def stored(run) -> list[Group]:
    """Every group in the buffer's file."""
    (path,) = run.folder.glob("buffer/*.sqlite")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return [decode_header(row[0], Group) for row in db.execute("SELECT header FROM groups")]


def test_a_group_in_the_middle_is_finished_by_another_replica(stack, simulated):
    """Case 104: versions are kept, and no token is sampled twice."""
    run = stack().up(*simulated, *LONG, "run.steps=24")
    run.until_step(2, 240)
    run.until(lambda: run.role("rollout-0"), 120).send_signal(signal.SIGTERM)
    handed = run.until(
        lambda: re.findall(r"ticket (\d+): handed over (\d+) tokens\n", run.text), 120, "hand-over"
    )
    run.until(lambda: "rollout-0 ended (exit code 0)" in run.text, 120, "end in order")
    assert "not ended after" not in run.text
    begun = {int(ticket): int(tokens) for ticket, tokens in handed if int(tokens)}
    assert begun
    found = run.until(
        lambda: {group.ticket: group for group in stored(run) if group.ticket in begun and group.attempt}, 200
    )
    for ticket, group in found.items():
        assert group.attempt >= 1
        assert group.token_count >= begun[ticket]
        assert not any(sample.unscored for sample in group.samples)
        assert group.oldest_version >= group.admitted_version
    assert run.wait(300) == 0, run.text[-4000:]
    run.assert_exactly_once()
    assert "discarded" not in run.audit()
    assert "Traceback" not in run.text
    run.assert_gone()


def test_a_straggler_is_finished_by_a_replica_that_is_free(stack, simulated):
    """Case 77: the oldest group of a full replica goes on in the express lane, where it was, and trains once."""
    lane = ["rollout.express=1", "rollout.express_sequences=8"]
    run = stack().up(*simulated, *LONG, *lane, "run.steps=1000")
    handed = run.until(
        lambda: [
            int(ticket)
            for ticket, tokens in re.findall(r"ticket (\d+): handed over (\d+) tokens\n", run.text)
            if int(tokens)
        ],
        240,
        "hand-over",
    )
    found = run.until(
        lambda: [group for group in stored(run) if group.ticket in handed and group.attempt], 200, "its end"
    )
    for group in found:
        assert group.owner == "rollout-1"  # which starts nothing of its own
        assert not any(sample.unscored for sample in group.samples)
        assert all(sum(count for _, count in each.versions) == each.tokens for each in group.samples)
        assert group.oldest_version >= group.admitted_version
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(300) == 0, run.text[-4000:]
    run.assert_exactly_once()
    assert "discarded" not in run.audit()
    assert "Traceback" not in run.text
    run.assert_gone()
