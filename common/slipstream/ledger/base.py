"""What the groups of ledger calls share: the connection, and what this process has joined as."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from slipstream.ledger.connection import Connection


class LedgerCalls:
    """Base of the groups of calls.

    A member's incarnation goes with each of its calls, so that a process that was replaced is refused. The
    number of the newest grant that arrived goes along too: a grant the caller never saw is given again.
    """

    def __init__(self, book: Connection) -> None:
        self._book = book
        self._incarnations: dict[str, str] = {}
        self._grants: dict[str, int] = {}
        self._eval_grants: dict[str, int] = {}
        self._unreadable: set[bytes] = set()
        self._one_claim: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
