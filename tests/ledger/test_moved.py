"""A step that is booked moved the weights: the lines of a run show it."""

from __future__ import annotations

from slipstream.ledger.counts import unmoved


def step(number, version, **changes):
    told = {"stepped": True, "updates": 1, "tickets": [[number, 0], [number + 100, 1]], "weights": [3, 1]}
    return {"step": number, "version": version, **told, **changes}


def test_steps_that_moved_the_weights_are_no_problem_also_over_a_restart():
    assert unmoved([step(1, 1), step(2, 9), step(3, 10)]) == []


def test_a_step_without_an_update_a_version_that_stands_and_a_ticket_without_weight_are_named():
    assert unmoved([step(1, 1), step(2, 1, stepped=False, updates=0, weights=[0, 4])]) == [
        "step 2 made no update",
        "step 2 has version 1, and the one before it 1",
        "step 2 trained ticket 2 without weight",
    ]
