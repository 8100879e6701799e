"""One server at a time on a run's ledger files, also when its supervisor was killed and the server lives on.

Two servers that append to one file would end the book. So the server inherits a locked file: the lock goes when the
last process that has it open is gone, however it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError

WAIT_SECONDS = 20.0
_POLL_SECONDS = 0.05


@asynccontextmanager
async def data_lock(folder: Path, seconds: float = WAIT_SECONDS) -> AsyncIterator[int]:
    """Wait until no server has the files of a folder open; gives the descriptor that the next one is to inherit.

    Raises:
        SlipstreamError: One still has after `seconds`.
    """
    lock = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + seconds
        while not _taken(lock):
            if time.monotonic() > end:
                raise SlipstreamError(
                    f"the server of an earlier start still holds {folder}: end it (fuser {folder.parent}/"
                    f".{folder.name}.lock names it), then resume"
                )
            await asyncio.sleep(_POLL_SECONDS)
        yield lock
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
