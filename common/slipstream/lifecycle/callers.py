"""A server with a thread for each caller, for a bounded number of callers, and for a bounded time each."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
from typing import Any

from slipstream.lifecycle.address import family_of
from slipstream.lifecycle.descriptors import cut

BUSY_SECONDS = 0.05


class BoundedCallers(socketserver.ThreadingMixIn):
    """Mixed into a TCP server: when one caller too many comes, the oldest is cut off; each has `seconds` in all.

    Attributes:
        listener: What the connections that are cut off are counted under.
    """

    address_family: int
    daemon_threads = True
    request_queue_size = 64
    listener = "pages"
    most = 32
    seconds = 10.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.address_family = family_of(arguments[0][0])
        self._callers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments, **options)

    def get_request(self) -> Any:
        """The next caller; without a descriptor for it the oldest is cut off, and the next one waits a moment."""
        try:
            return super().get_request()  # type: ignore[misc]
        except OSError:
            self._cut(keep=self.most // 2)
            time.sleep(BUSY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a caller, once there is room."""
        self._cut(keep=self.most - 1)
        with self._lock:
            self._callers[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off whoever has had its time; called by the server's loop, twice a second."""
        self._cut(before=time.monotonic() - self.seconds)

    def shutdown_request(self, request: Any) -> None:
        """Forget a caller that was served."""
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went or was cut off is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[misc]

    def _cut(self, keep: int | None = None, before: float = 0.0) -> None:
        with self._lock:
            over = len(self._callers) - keep if keep is not None else 0
            oldest = [
                caller
                for place, (caller, since) in enumerate(self._callers.items())
                if place < over or since < before
            ]
            for caller in oldest:
                del self._callers[caller]
                with contextlib.suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)
        cut[self.listener] += len(oldest)
