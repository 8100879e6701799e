"""Finding a run and its ledger, for commands that look at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config.load import load_config, load_recorded
from slipstream.errors import UserError
from slipstream.run.folder import RunFolder
from slipstream.secrets import redis_password

if TYPE_CHECKING:
    from slipstream.ledger.client import Ledger

PATIENCE_SECONDS = 10.0  # a person waits for the answer; a run's own processes are more patient


def find_run(run: str) -> tuple[RunFolder, str | None]:
    """A run's folder, and the URL of its ledger when that is not its own embedded server.

    Where the folder is not at hand, as in a pod, the config that the run's roles are given says both.

    Raises:
        UserError: No run lies there.
    """
    path = Path(run).resolve()
    if path.is_file():
        config, _ = load_config(path)
        if config.redis.url is None:
            raise UserError(f"redis.url is not set in {run}", "give the run's folder, or set redis.url")
        return RunFolder.of(config), config.redis.url
    if not (path / "config.yaml").is_file():
        raise UserError(f"{run} holds no run", "give the folder of a run, such as runs/NAME")
    config, _ = load_recorded(path / "config.yaml")
    return RunFolder(path.parent, path.name), config.redis.url


@asynccontextmanager
async def open_ledger(run: str) -> AsyncIterator[tuple[RunFolder, Ledger]]:
    """A run's folder and its ledger: the live one, or for an ended run its embedded server, started for the while.

    Raises:
        UserError: There is no such run, or it has no ledger.
        LedgerError: Its server does not answer.
    """
    from slipstream.ledger.client import Ledger
    from slipstream.supervisor.lone_server import lone_server

    folder, url = find_run(run)
    async with AsyncExitStack() as stack:
        if url is None:
            url = await stack.enter_async_context(lone_server(folder))
        ledger = await Ledger.connect(url, folder.name, password=redis_password(), deadline=PATIENCE_SECONDS)
        yield folder, await stack.enter_async_context(ledger)
