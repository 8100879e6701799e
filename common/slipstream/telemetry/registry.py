"""The metrics of one process: made here, each with its description, and shown on its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.config.sections.services_config import NetworkSection
from slipstream.lifecycle.descriptors import cut
from slipstream.telemetry.health import Health, serve_pages

Kind = Literal["counter", "gauge", "histogram"]
Reading = Callable[[], Iterable[tuple[Sequence[str], float]]]
PREFIX = "slipstream_"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric as the documentation lists it; `name` is the exported one."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass
class Load:
    """Something that is busy to some amount: its amount now, and the time integral of it so far."""

    amount: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _seconds: float = 0.0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def set(self, amount: float) -> None:
        """From now on it is busy by this amount."""
        self._seconds, self._since, self.amount = self.seconds, self.clock(), amount

    @property
    def seconds(self) -> float:
        """Amount times seconds since it was made."""
        return self._seconds + self.amount * (self.clock() - self._since)


class Metrics:
    """The metrics of one process and the pages that show them.

    Attributes:
        described: Every metric of this process.
        health: What `/healthz` and `/readyz` answer.
        port: Where they are served, once they are.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.described: list[Described] = []
        self.health = Health()
        self.port = 0
        self.leases_lost = self.counter("leases_lost_total", "times that this process's lease ran out")
        what = "connections closed to make room for others, by listener: data, weights or pages"
        self.pulled(
            "counter",
            "connections_cut_total",
            what,
            lambda: [((listener,), cut[listener]) for listener in ("data", "weights", "pages")],
            "listener",
        )
        self.gpus = self.gauge("gpus", "GPUs that this process holds")

    def serve(self, network: NetworkSection, who: str = "", run: str = "") -> None:
        """Serve the pages; port 0 takes a free one, which `port` then names.

        Raises:
            UserError: The port is taken.
        """
        self.port = serve_pages(self.registry, self.health, network, who, run)

    def detail(self) -> dict[str, float]:
        """What others should see of this process in the ledger, in a few numbers that only grow, or levels."""
        return {}

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        """A counter of this process."""
        self._note(name, "counter", what, labels)
        return Counter(PREFIX + name, what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """A gauge of this process."""
        self._note(name, "gauge", what, labels)
        return Gauge(PREFIX + name, what, labels, registry=self.registry)

    def histogram(self, name: str, what: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """A histogram of this process; buckets are upper bounds."""
        self._note(name, "histogram", what, labels)
        return Histogram(PREFIX + name, what, labels, buckets=buckets, registry=self.registry)

    def pulled(
        self, kind: Literal["counter", "gauge"], name: str, what: str, read: Reading, *labels: str
    ) -> None:
        """A metric whose values are kept elsewhere and read at each scrape, from another thread."""
        self._note(name, kind, what, labels)
        self.registry.register(_Pulled(kind, PREFIX + name, what, labels, read))

    def _note(self, name: str, kind: Kind, what: str, labels: Sequence[str]) -> None:
        self.described.append(Described(PREFIX + name, kind, what, tuple(labels)))


class _Pulled(Collector):
    def __init__(self, kind: str, name: str, what: str, labels: Sequence[str], read: Reading) -> None:
        self._family: type[Any] = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        self._name, self._what, self._labels, self._read = name, what, labels, read

    def describe(self) -> Iterator[Metric]:
        yield self._family(self._name, self._what, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._what, labels=self._labels)
        for labels, value in _read_while_it_changes(self._read):
            family.add_metric(labels, value)
        yield family


def _read_while_it_changes(read: Reading) -> list[tuple[Sequence[str], float]]:
    """The event loop may change a dictionary in the middle of our walk through it; then we walk again."""
    for _ in range(3):
        with suppress(RuntimeError):
            return list(read())
    return []
