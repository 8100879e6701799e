"""Reads a run's steps.jsonl from standard input: in the line of descent no ticket may be trained twice.

A step that was made again after a restart replaces the lost one and all after it. Prints the newest step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter


def line_of_descent(records: list[dict]) -> list[dict]:
    """The steps that count: those that no later restart went back behind."""
    line: list[dict] = []
    for record in records:
        while line and line[-1]["step"] >= record["step"]:
            line.pop()
        line.append(record)
    return line


def problems(line: list[dict]) -> list[str]:
    """What is wrong with a line of descent, in words."""
    found = []
    if [step["step"] for step in line] != list(range(1, len(line) + 1)):
        found.append("steps are missing")
    if (versions := [step["version"] for step in line]) != sorted(versions):
        found.append("a version went back")
    counts = Counter(ticket for step in line for ticket, _ in step["tickets"])
    if twice := [ticket for ticket, count in counts.items() if count > 1]:
        found.append(f"tickets trained twice: {twice}")
    return found


if __name__ == "__main__":
    text = sys.stdin.read()
    steps = line_of_descent([json.loads(row) for row in text[: text.rfind("\n") + 1].splitlines()])
    if wrong := problems(steps):
        sys.exit("; ".join(wrong))
    print(steps[-1]["step"] if steps else 0)
