"""The health check of a container says what the role's own page says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slipstream.telemetry.probe import PORT, probe


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()
        self.wfile.write(b"ok\n" if self.path == "/healthz" else b"waits for\nweights\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_200_is_healthy_and_anything_else_is_not(port: int) -> None:
    environment = {PORT: str(port)}
    assert probe("/healthz", environment) == (True, "/healthz: ok")
    assert probe("/readyz", environment) == (False, "503 /readyz: waits for weights")


def test_nobody_there_is_not_healthy(port: int) -> None:
    healthy, said = probe("/healthz", {PORT: "1"})
    assert not healthy
    assert PORT in said
    assert not probe("/healthz", {PORT: "no-port"})[0]


@pytest.mark.parametrize("environment", [{}, {PORT: "0"}, {PORT: ""}])
def test_a_container_that_serves_nothing_is_healthy(environment: dict[str, str]) -> None:
    assert probe("/healthz", environment)[0]
