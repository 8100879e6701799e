"""The ledger: the one book of who has what at which version. Import `Ledger` from here.

Each method is one atomic function on the server, may be repeated with the same answer, and can be cancelled at
any moment: what a lost reply had handed out is handed out again by the next call.
"""

from __future__ import annotations

import asyncio

from slipstream.ledger.books import BookCalls
from slipstream.ledger.connection import Clock, Connection, check_server, open_client
from slipstream.ledger.evals import EvalCalls
from slipstream.ledger.members import MemberCalls
from slipstream.ledger.runs import RunCalls
from slipstream.ledger.steps import StepCalls
from slipstream.ledger.tickets import TicketCalls


class Ledger(RunCalls, MemberCalls, TicketCalls, StepCalls, EvalCalls, BookCalls):
    """Client of one run's ledger; the methods stand in the modules of its bases."""

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        password: str | None = None,
        deadline: float = 30.0,
        now: Clock | None = None,
    ) -> Ledger:
        """Connect and check the server.

        Args:
            url: redis://, rediss:// or unix:// address (setting `redis.url`).
            run: Run id; every key carries it.
            password: The server's password, if it has one.
            deadline: Seconds within which any one call must succeed, reconnecting included.
            now: Clock for tests, in seconds; by default the server's time counts.

        Raises:
            UserError: A server that cannot hold the book; names the setting.
            LedgerError: No answer until the deadline.
        """
        client = open_client(url, password)
        try:
            await check_server(client, url, deadline)
        except BaseException:
            await asyncio.shield(client.aclose())
            raise
        return cls(Connection(client, run, deadline, now))

    async def close(self) -> None:
        """Close the sockets; what this process holds stays its own until its lease runs out."""
        await self._scored.close()
        await self._book.close()

    async def __aenter__(self) -> Ledger:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
