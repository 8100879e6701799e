"""The ledger's server as a victim: killed and started again with its data, behind the proxy."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

import redis

from slipstream.ledger.server import embedded_server
from slipstream.run.folder import RunFolder


class LedgerServer:
    """A Valkey with an append-only file in `folder`; `client` reaches it past the proxy."""

    def __init__(self, folder: Path) -> None:
        # a unix socket's path is limited to 107 bytes, which a test's own folder may pass
        self.folder = folder
        self._place = tempfile.TemporaryDirectory(prefix="chaos-")
        self.socket = Path(self._place.name) / "redis.sock"
        self._how = embedded_server(folder, socket=self.socket)
        self._log = folder / "server.log"
        self.process: subprocess.Popen[bytes]
        self.start()
        self.client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=0.5)
        end = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.02)

    @property
    def url(self) -> str:
        """Its address past the proxy."""
        return self._how.url

    def start(self) -> None:
        """Start it on the data it has."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._how.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def revive(self) -> None:
        """Start it again if it is dead: it has nobody else to do it."""
        if self.process.poll() is not None:
            self.start()

    def close(self) -> None:
        """End it; what it held stays in its folder."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        self._place.cleanup()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


class OwnServer:
    """The Valkey that `up` starts itself: its supervisor starts it again, under another address after a resume."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._clients: dict[str, redis.Redis] = {}

    @property
    def url(self) -> str:
        """Its address now; raises `redis.ConnectionError` while it is nowhere."""
        url = self._folder.live_url
        if url is None:
            raise redis.ConnectionError("the run has no server now")
        return url

    @property
    def client(self) -> redis.Redis:
        """A connection to where it is now; raises `redis.ConnectionError` while it is nowhere."""
        url = self.url
        if url not in self._clients:
            self._clients[url] = redis.Redis(unix_socket_path=url.removeprefix("unix://"), socket_timeout=0.5)
        return self._clients[url]

    def revive(self) -> None:
        """The supervisor does."""

    def close(self) -> None:
        """Forget the connections; the server itself ends with the run."""
        for client in self._clients.values():
            client.close()
