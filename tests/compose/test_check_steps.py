"""The check of the compose test finds what it is there for."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

CHECK = runpy.run_path(str(Path(__file__).with_name("check_steps.py")))


def step(number: int, version: int, *tickets: int) -> dict[str, Any]:
    return {"step": number, "version": version, "tickets": [[ticket, 0] for ticket in tickets]}


def problems(*steps: dict[str, Any]) -> list[str]:
    found = CHECK["problems"](CHECK["line_of_descent"](list(steps)))
    assert isinstance(found, list)
    return found


def test_a_run_that_went_back_and_trained_the_lost_steps_again_is_right() -> None:
    assert problems(step(1, 1, 1, 2), step(2, 2, 3, 4), step(3, 3, 5), step(2, 4, 4, 3), step(3, 5, 5)) == []


def test_a_ticket_in_two_steps_is_found() -> None:
    assert problems(step(1, 1, 1, 2), step(2, 2, 2, 3)) == ["tickets trained twice: [2]"]


def test_missing_steps_and_versions_that_go_back_are_found() -> None:
    assert problems(step(1, 1, 1), step(3, 2, 2)) == ["steps are missing"]
    assert problems(step(1, 2, 1), step(2, 1, 2)) == ["a version went back"]
