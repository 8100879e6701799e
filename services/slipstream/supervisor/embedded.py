"""The embedded Valkey: its place in the run's folder, a private socket, and when it answers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from slipstream.errors import SlipstreamError

_START_SECONDS = 20.0


class EmbeddedSocket:
    """A unix socket in a folder that only this user may enter; its path is short, for 107 bytes are the limit."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        self.path = self.folder / "redis.sock"

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
            raise SlipstreamError(f"the embedded Valkey did not answer within {_START_SECONDS:.0f} s") from None

    def remove(self) -> None:
        """Remove the socket's folder; harmless when repeated."""
        shutil.rmtree(self.folder, ignore_errors=True)

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
