from __future__ import annotations

import json
import logging

import pytest

from slipstream.telemetry import logs

FIELDS = {"time", "level", "message", "run", "role", "replica", "ticket", "version", "step"}


@pytest.fixture
def lines(capsys, monkeypatch):
    """Set the logs up anew, and read what they wrote."""
    root = logging.getLogger("slipstream")
    before = (root.handlers[:], root.level, root.propagate)
    monkeypatch.setattr(logs, "_process_wide", {})
    monkeypatch.delenv("SLIPSTREAM_PARENT", raising=False)

    def read(*arguments, **more):
        logs.set_up_logs(*arguments, **more)
        return lambda: capsys.readouterr().err.rstrip("\n").split("\n")

    yield read
    root.handlers[:], root.level, root.propagate = before


@pytest.mark.parametrize(("who", "role"), [("up", ""), ("rollout-0", "rollout"), ("pod-7f", "reward")])
def test_every_json_line_has_the_same_fields(lines, who, role):
    read = lines(who, "r", "json", role=role)
    log = logging.getLogger("slipstream.any")
    log.info("plain")
    log.warning("of a ticket", extra={"ticket": 3})
    logs.know(version=5)
    logs.know(step=4)
    log.info("later")
    plain, ticket, later = map(json.loads, read())
    assert set(plain) == set(ticket) == set(later) == FIELDS
    assert (plain["run"], plain["role"], plain["replica"]) == ("r", role or who, who)
    assert (plain["ticket"], plain["version"], plain["step"]) == (None, None, None)
    assert ticket["ticket"] == 3
    assert (later["version"], later["step"], later["ticket"]) == (5, 4, None)


@pytest.mark.parametrize("style", ["human", "json"])
def test_a_cause_is_marked_for_the_supervisor_alone(lines, monkeypatch, style):
    log = logging.getLogger("slipstream.any")
    read = lines("buffer", "r", style)
    log.error("the cause", extra={"last_word": True})
    assert not read()[0].startswith(logs.LAST_WORD)
    monkeypatch.setenv("SLIPSTREAM_PARENT", "1")
    log.error("no cause")
    log.error("the cause", extra={"last_word": True})
    assert [line.startswith(logs.LAST_WORD) for line in read()] == [False, True]


def test_each_trouble_is_said_once_in_a_stretch_with_how_many_more_there_were(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    troubles, log = logs.Troubles(), logging.getLogger("slipstream.test")
    for ticket in range(110):
        troubles.warn(log, "ticket %d is still here: %s", ticket, "the buffer is away")
    troubles.warn(log, "ticket %d failed", 3)
    now[0] = 11.0
    troubles.warn(log, "ticket %d is still here: %s", 110, "the buffer is away")
    assert caplog.messages == [
        "ticket 0 is still here: the buffer is away",
        "ticket 3 failed",
        "ticket 110 is still here: the buffer is away; 109 more were not shown",
    ]
