from __future__ import annotations

from slipstream.telemetry.logs import Pace


def test_a_flood_of_lines_is_held_back_and_counted():
    pace = Pace(lines=2, seconds=10.0)
    assert [pace.allows(now) for now in (0.0, 1.0, 2.0, 3.0, 10.0)] == [True, True, False, False, True]
    assert pace.held_back() == 2
    assert pace.held_back() == 0
