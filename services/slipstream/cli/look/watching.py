"""`status`, `top` and `report`: each imports what it needs when it is called, so that other commands start fast."""

from __future__ import annotations

import argparse


def status(options: argparse.Namespace) -> int:
    """Where a run stands."""
    from slipstream.cli.look.status import status

    return status(options)


def top(options: argparse.Namespace) -> int:
    """Watch a run in the terminal."""
    from slipstream.cli.look.top import top

    return top(options)


def report(options: argparse.Namespace) -> int:
    """Write a run as one page."""
    from slipstream.cli.look.report import report

    return report(options)
