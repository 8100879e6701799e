from __future__ import annotations

import logging

from slipstream.telemetry.logs import Pace


def test_a_flood_of_lines_is_held_back_and_counted():
    pace = Pace(lines=2, seconds=10.0)
    assert [pace.allows(now) for now in (0.0, 1.0, 2.0, 3.0, 10.0)] == [True, True, False, False, True]
    assert pace.held_back() == 2
    assert pace.held_back() == 0


def test_the_next_line_shown_tells_of_those_held_back(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("slipstream.telemetry.logs.time.monotonic", lambda: now[0])
    pace, log = Pace(lines=1, seconds=10.0), logging.getLogger("slipstream.test")
    for second, ticket in enumerate((7, 8, 9)):
        now[0] = second
        pace.warn(log, "refused %s", "this", ticket=ticket)
    now[0] = 10.0
    pace.warn(log, "refused %s", "that")
    assert [record.getMessage() for record in caplog.records] == [
        "refused this",
        "refused that; 2 more were not shown",
    ]
    assert [record.ticket for record in caplog.records] == [7, None]
