"""`drop`: leave one ticket out of a run because a person says so."""

from __future__ import annotations

import argparse
import asyncio

from slipstream.cli.look.find_run import open_ledger
from slipstream.errors import EXIT_OK, FencedError, UserError

ABOUT = """Works on a run that is up and on one that has stopped. The ticket ends as dropped, reason by_hand, whatever
attempt it is at. One that the learner is training on right now is dropped as soon as the step gives it back, as when
the learner dies of it; if the step is made, it has trained. `slipstream status` shows the count."""


def drop(options: argparse.Namespace) -> int:
    """Drop a ticket.

    Raises:
        UserError: It was never issued, or has been trained, dropped or failed.
    """
    state = asyncio.run(_drop(options.run, options.ticket))
    word = (
        "is dropped"
        if state == "dropped"
        else "is in the step being made, and is dropped if that gives it back"
    )
    print(f"ticket {options.ticket} {word}")  # noqa: T201
    return EXIT_OK


async def _drop(run: str, ticket: int) -> str:
    async with open_ledger(run) as (_, ledger):
        try:
            return await ledger.drop_by_hand(ticket)
        except FencedError as error:
            raise UserError(f"TICKET {ticket}: {error}", "name a ticket that is on its way or stored") from None
