"""The pages of a process: `/metrics`, `/healthz` (is it alive), `/readyz` (may it be given work), `/version`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slipstream.config.sections.services_config import NetworkSection
from slipstream.errors import UserError
from slipstream.lifecycle.callers import BoundedCallers

if TYPE_CHECKING:
    from slipstream.lifecycle.life import Life

PULSE_SECONDS = 1.0
DEAD_SECONDS = 60.0  # a compiling kernel or a busy machine may hold the loop for a while
_REQUEST_SECONDS = 5.0


class Health:
    """Whether a process is alive and ready.

    Attributes:
        waits_for: What keeps it from being ready, in words; an empty string when nothing does. It is called from
            another thread and must not block.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned = clock()
        self.waits_for: Callable[[], str] = lambda: "has not joined the run yet"

    async def pulse(self, life: Life) -> None:
        """Show that the event loop turns, for as long as the process lives."""
        while not life.stopping:
            self._turned = self._clock()
            await life.pause(PULSE_SECONDS)

    def stuck_for(self) -> float:
        """Seconds since the event loop turned, when that is too long; else 0."""
        silent = self._clock() - self._turned
        return silent if silent > DEAD_SECONDS else 0.0


def serve_pages(
    registry: CollectorRegistry, health: Health, network: NetworkSection, who: str, run: str
) -> int:
    """Serve the pages from a thread of their own; returns the port.

    Raises:
        UserError: The port is taken.
    """

    labelled = _OfRun(registry, run)

    class Pages(_Pages):
        answers = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(labelled)),
            "/healthz": lambda: (
                _verdict(f"the event loop has not turned for {health.stuck_for():.0f} s")
                if health.stuck_for()
                else _verdict("")
            ),
            "/readyz": lambda: _verdict(health.waits_for()),
            "/version": lambda: (200, "application/json", json.dumps(_version(who, run)).encode()),
        }

    try:
        server = _Server((network.host, network.metrics_port), Pages)
    except OSError as error:
        problem = f"network.metrics_port {network.metrics_port} on {network.host}: {error.strerror}"
        raise UserError(problem, "choose another port, or 0 for a free one") from None
    threading.Thread(target=server.serve_forever, name="pages", daemon=True).start()
    return int(server.server_port)


class _Server(BoundedCallers, HTTPServer):
    """Open to whoever reaches it, so for few at once."""


class _Pages(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS  # a client that says nothing does not keep its thread
    answers: dict[str, Callable[[], tuple[int, str, bytes]]] = {}

    def do_GET(self) -> None:
        answer = self.answers.get(self.path.partition("?")[0])
        status, kind, body = answer() if answer else (404, "text/plain", f"{' '.join(self.answers)}\n".encode())
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "slipstream"

    def log_message(self, format: str, *args: object) -> None:
        """A probe each second is no news."""


class _OfRun(Collector):
    """A registry whose every sample says which run it is of, so that no scrape config needs to know."""

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        self._registry, self._labels = registry, {"run": run} if run else {}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples
            ]
            yield metric


def _verdict(trouble: str) -> tuple[int, str, bytes]:
    return (
        (503, "text/plain; charset=utf-8", f"{trouble}\n".encode()) if trouble else (200, "text/plain", b"ok\n")
    )


def _version(who: str, run: str) -> dict[str, str]:
    try:
        version = importlib.metadata.version("slipstream")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {"version": version, "python": platform.python_version(), "process": who, "run": run}
