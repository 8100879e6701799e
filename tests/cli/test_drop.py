"""`slipstream drop RUN TICKET`: what it says, and what it asks of the ledger."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.cli import drop as drop_module
from slipstream.cli.main import main
from slipstream.errors import EXIT_OK, EXIT_USER, FencedError


class Book:
    """A ledger of three tickets: 1 can go, a step has 2, 3 has trained."""

    async def drop_by_hand(self, ticket: int) -> str:
        if ticket == 3:
            raise FencedError("ticket 3 attempt 0 is trained")
        return "taken" if ticket == 2 else "dropped"


@pytest.fixture(autouse=True)
def ledger(monkeypatch):
    @asynccontextmanager
    async def opened(run):
        assert run == "runs/mine"
        yield Path(run), Book()

    monkeypatch.setattr(drop_module, "open_ledger", opened)


@pytest.mark.parametrize(
    ("ticket", "code", "says"),
    [
        ("1", EXIT_OK, "ticket 1 is dropped\n"),
        ("2", EXIT_OK, "ticket 2 is in the step being made, and is dropped if that gives it back\n"),
        (
            "3",
            EXIT_USER,
            "slipstream: TICKET 3: ticket 3 attempt 0 is trained; name a ticket that is on its way or stored\n",
        ),
    ],
)
def test_a_ticket_is_dropped_and_what_became_of_it_is_said(ticket, code, says, capsys):
    assert main(["drop", "runs/mine", ticket]) == code
    printed = capsys.readouterr()
    assert (printed.out or printed.err) == says


def test_what_is_no_ticket_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["drop", "runs/mine", "seven"])
    assert ended.value.code == EXIT_USER
    assert "TICKET" in capsys.readouterr().err
