"""The embedded Valkey: its place in the run's folder, a private socket, and when it answers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from slipstream.errors import SlipstreamError

_START_SECONDS = 20.0
_PREFIX = "slipstream-"


class EmbeddedSocket:
    """A unix socket in a folder that only this user may enter; its path is short, for 107 bytes are the limit.

    The folder is locked for as long as this process lives, so that the next one can tell which are left over.
    """

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.path = self.folder / "redis.sock"
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def url(self) -> str:
        """The URL that every role connects to."""
        return f"unix://{self.path}"

    async def ready(self) -> None:
        """Wait until the server answers a PING.

        Raises:
            SlipstreamError: It did not within its start time.
        """
        try:
            await asyncio.wait_for(self._answered(), _START_SECONDS)
        except TimeoutError:
            raise SlipstreamError(
                f"the embedded Valkey did not answer within {_START_SECONDS:.0f} s; see logs/valkey.log of the run"
            ) from None

    def remove(self) -> None:
        """Remove the socket's folder; harmless when repeated."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _answered(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self.path))
                writer.write(b"PING\r\n")
                line = await reader.readline()
                writer.close()
                await writer.wait_closed()
                if line.startswith(b"+PONG"):
                    return
            except OSError:
                pass  # not listening yet, or still loading its file
            await asyncio.sleep(0.05)


def sweep(directory: Path) -> None:
    """Remove the socket folders of processes that were killed."""
    for lock in directory.glob(f"{_PREFIX}*/lock"):
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(handle)
