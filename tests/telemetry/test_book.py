"""The ledger as metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from slipstream.errors import LedgerError
from slipstream.ledger.counts import Counts
from slipstream.ledger.records import RunState, RunTerms
from slipstream.lifecycle.life import Life
from slipstream.telemetry import book as book_module
from slipstream.telemetry.book import BookMetrics, Page
from slipstream.telemetry.registry import Metrics

COUNTERS = {
    "groups:rolling": "2",
    "groups:trained": "4",
    "tokens:trained": "40",
    "groups:dropped:stale": "1",
    "tokens:dropped:stale": "9",
    "tokens_in": "52",
    "tokens_discarded": "3",
    "unscored/timeout": "6",
}


@pytest.fixture
def page(member) -> Page:
    state = RunState(
        terms=RunTerms(run_id="r", dataset_fingerprint="f", prompts=9, seed=0),
        version=5,
        step=5,
        durable_step=3,
        next=7,
        status="paused",
        finish_reason="",
        learner="l",
        failures_in_row=0,
        last_failure="",
        lost_versions=[],
        changed=[],
    )
    members = [member("rollout-0", version=5), member("rollout-1", version=3), member("rollout-2")]
    return Page(Counts.read(7, COUNTERS), state, members, (100, 0))


def shown(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_the_equation_and_the_replicas_are_shown(page):
    metrics = Metrics()
    book = BookMetrics(metrics)
    assert "slipstream_ledger_imbalance_groups" not in shown(
        metrics
    )  # nothing is known yet, and 0 would be a claim
    book.show(page)
    values = shown(metrics)
    assert values["slipstream_ledger_imbalance_groups"] == 0
    assert values["slipstream_ledger_imbalance_tokens"] == 0
    assert values['slipstream_ledger_groups{state="trained"}'] == 4
    assert values['slipstream_ledger_wasted_tokens_total{reason="stale"}'] == 9
    assert values['slipstream_ledger_wasted_tokens_total{reason="discarded"}'] == 3
    assert values['slipstream_ledger_unscored_samples_total{reason="timeout"}'] == 6
    assert values['slipstream_replica_lag_versions{replica="rollout-1"}'] == 2
    assert 'slipstream_replica_lag_versions{replica="rollout-2"}' not in values  # it serves nothing yet
    assert values["slipstream_replica_spread_versions"] == 2
    assert values['slipstream_members{role="rollout"}'] == 3
    assert values['slipstream_run_status{status="paused"}'] == 1


def test_a_book_that_does_not_add_up_shows_by_how_much(page):
    metrics = Metrics()
    BookMetrics(metrics).show(replace(page, counts=Counts.read(8, COUNTERS)))
    assert shown(metrics)["slipstream_ledger_imbalance_groups"] == 1


def test_a_restart_is_counted_once(page, member):
    metrics = Metrics()
    book = BookMetrics(metrics)
    for incarnation in ("a", "a", "b"):
        book.show(replace(page, members=[member("buffer", role="buffer", incarnation=incarnation)]))
    assert shown(metrics)['slipstream_member_starts_total{role="buffer"}'] == 2


async def test_a_ledger_that_is_away_leaves_the_last_page(page, monkeypatch):
    monkeypatch.setattr(book_module, "EVERY_SECONDS", 0.0)
    life, metrics = Life(), Metrics()

    class Ledger:
        calls = 0

        async def counts(self):
            self.calls += 1
            if self.calls == 2:
                life.closing()
                raise LedgerError("away")
            return page.counts

        async def state(self):
            return page.state

        async def members(self):
            return page.members

        async def memory(self):
            return page.memory

    await BookMetrics(metrics).follow(Ledger(), life)  # type: ignore[arg-type]
    assert shown(metrics)["slipstream_ledger_issued_groups_total"] == 7
