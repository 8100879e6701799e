"""The pages of a process, asked over HTTP as a probe asks them."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest

from slipstream.config.sections.services_config import NetworkSection
from slipstream.errors import UserError
from slipstream.lifecycle.callers import BoundedCallers
from slipstream.lifecycle.descriptors import cut
from slipstream.telemetry.health import DEAD_SECONDS, Health
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.telemetry.registry import Load


def ask(port: int, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def metrics():
    made = RolloutMetrics()
    made.serve(NetworkSection(), "rollout-0", "r")
    return made


def test_metrics_are_shown_with_their_units(metrics):
    metrics.sampled([3, 5], 0.2)
    status, text = ask(metrics.port, "/metrics")
    assert status == 200
    assert 'slipstream_rollout_tokens_total{run="r"} 8.0' in text
    assert 'slipstream_rollout_sample_tokens_bucket{le="4.0",run="r"} 1.0' in text
    assert 'process_cpu_seconds_total{run="r"}' in text


def test_ready_says_what_it_waits_for(metrics):
    assert ask(metrics.port, "/readyz") == (503, "has not joined the run yet\n")
    metrics.health.waits_for = lambda: "no live reward"
    assert ask(metrics.port, "/readyz") == (503, "no live reward\n")
    metrics.health.waits_for = lambda: ""
    assert ask(metrics.port, "/readyz") == (200, "ok\n")


def test_version_and_health_and_a_page_that_is_not_there(metrics):
    assert json.loads(ask(metrics.port, "/version")[1])["process"] == "rollout-0"
    assert ask(metrics.port, "/healthz") == (200, "ok\n")
    assert ask(metrics.port, "/etc/passwd")[0] == 404


def test_a_loop_that_does_not_turn_is_not_healthy():
    now = [0.0]
    health = Health(clock=lambda: now[0])
    now[0] = DEAD_SECONDS
    assert health.stuck_for() == 0.0
    now[0] += 1
    assert health.stuck_for() == DEAD_SECONDS + 1


def test_a_taken_port_is_named_with_its_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"network.metrics_port {port}"):
            RolloutMetrics().serve(NetworkSection(metrics_port=port))


def test_load_is_the_integral_of_what_it_was_set_to():
    now = [0.0]
    load = Load(clock=lambda: now[0])
    load.set(3)
    now[0] = 2.0
    load.set(1)
    now[0] = 5.0
    assert load.seconds == 3 * 2 + 1 * 3


def test_a_value_that_changes_under_the_scrape_is_read_again(metrics):
    answers = [RuntimeError("dictionary changed size during iteration")]

    def read():
        if answers:
            raise answers.pop()
        return [((), 4.0)]

    metrics.pulled("gauge", "test_moving", "moves", read)
    assert 'slipstream_test_moving{run="r"} 4.0' in ask(metrics.port, "/metrics")[1]


def test_idle_and_slow_callers_are_cut_off_and_the_page_is_still_shown(metrics):
    """The oldest go first, so that a scrape among strangers gets its answer."""
    before = cut["pages"]
    links = [socket.create_connection(("127.0.0.1", metrics.port), timeout=20) for _ in range(300)]
    assert ask(metrics.port, "/healthz")[0] == 200
    assert cut["pages"] - before >= 300 - BoundedCallers.most
    links[-1].sendall(b"GET /metrics HTTP/1.1\r\n")
    begun, held = time.monotonic(), True
    while held and time.monotonic() < begun + 40:  # a header that never ends
        try:
            links[-1].sendall(b"x: y\r\n")
            time.sleep(0.5)
        except OSError:
            held = False
    assert not held
    assert time.monotonic() - begun < 3 * BoundedCallers.seconds
    assert 'slipstream_connections_cut_total{listener="pages",run="r"}' in ask(metrics.port, "/metrics")[1]
    for link in links:
        link.close()
