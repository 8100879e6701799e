"""The buffer in a whole stack: several shards, a shard killed, a file lost, groups used twice."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_two_shards_with_reuse_survive_a_kill_and_a_lost_file(stack, simulated, kill):
    """Restarted, a shard serves the same groups; one whose file is gone has them rolled out anew. 24 prompts, two
    epochs, each group used twice: 48 trained, 96 uses, and nothing waits for what is lost."""
    run = stack().up(
        *simulated,
        "run.epochs=2",
        "data.limit=32",  # less 8 held out
        "buffer.shards=2",
        "buffer.reuse=2",
        "staleness.max_staleness=7",
        "learner.checkpoint.every=4",
        "rollout.engine.options.step_seconds=0.05",
    )
    run.until_step(3, 150)
    kill(run.until(lambda: run.role("buffer-0"), what="buffer-0"))
    run.until_step(8, 100)
    shard = run.until(lambda: run.role("buffer-1"), what="buffer-1")
    learner = run.until(lambda: run.role("learner"), what="the learner")
    learner.suspend()  # nobody takes, so every open group comes to rest in a shard
    run.until(lambda: "in flight 0 " in run.audit(), 100, "all open groups in the buffer")
    for path in (run.folder / "buffer").glob("shard-1.sqlite*"):
        path.unlink()
    kill(shard)
    learner.resume()
    assert run.wait(200) == 0, run.text
    assert "shard 1 has lost" in run.text
    audit = run.audit()
    assert "trained 48 " in audit, audit
    uses = [ticket for step in latest(run.steps()) for ticket, _ in step["tickets"]]
    assert {uses.count(ticket) for ticket in uses} == {2}
    assert re.search(r"dropped 0 .*failed 0 ", audit), audit
    run.assert_gone()


def latest(steps):
    line = []
    for step in steps:
        while line and line[-1]["step"] >= step["step"]:
            line.pop()
        line.append(step)
    return line
