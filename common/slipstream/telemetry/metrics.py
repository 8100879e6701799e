"""Prometheus metrics of every role, listed once; each process serves its own on its own port."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from slipstream.config.services import NetworkSection
from slipstream.errors import UserError


class Metrics:
    """The metrics of one process and the page that shows them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.port = 0

    def serve(self, network: NetworkSection) -> None:
        """Serve `/metrics`; port 0 takes a free one, which `port` then names.

        Raises:
            UserError: The port is taken.
        """
        try:
            server, _ = start_http_server(network.metrics_port, addr=network.host, registry=self.registry)
        except OSError as error:
            problem = f"network.metrics_port {network.metrics_port} on {network.host}: {error.strerror}"
            raise UserError(problem, "choose another port, or 0 for a free one") from None
        self.port = int(server.server_port)

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        """A counter of this process."""
        return Counter(f"slipstream_{name}", what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """A gauge of this process."""
        return Gauge(f"slipstream_{name}", what, labels, registry=self.registry)


class RolloutMetrics(Metrics):
    """A generator replica."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.counter("rollout_tokens_total", "completion tokens sampled")
        self.groups = self.counter("rollout_groups_total", "groups by how they ended", "end")
        self.in_flight = self.gauge("rollout_groups_in_flight", "groups being sampled or not yet stored")
        self.undelivered = self.gauge("rollout_groups_waiting", "sampled groups that wait for a credit")
        self.version = self.gauge("rollout_version", "version of the weights being served")
        self.swap_seconds = self.counter("rollout_swap_seconds_total", "seconds spent swapping weights")


class RewardMetrics(Metrics):
    """A reward replica."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = self.counter("reward_samples_total", "samples scored")
        self.unscored = self.counter("reward_unscored_total", "samples that could not be scored", "reason")
        self.refused = self.counter("reward_refused_total", "messages refused")
        self.seconds = self.counter("reward_seconds_total", "seconds spent scoring")


class BufferMetrics(Metrics):
    """A buffer shard."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = self.gauge("buffer_groups", "groups stored")
        self.tokens = self.gauge("buffer_tokens", "completion tokens stored")
        self.ready = self.gauge("buffer_ready_groups", "stored groups that no step has taken")
        self.received = self.counter("buffer_received_total", "groups by what became of them", "end")


class LearnerMetrics(Metrics):
    """The learner. The objective's own metrics are added when the first step reports them."""

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("learner_step", "optimizer steps made")
        self.version = self.gauge("learner_version", "newest version published")
        self.seconds = self.counter("learner_seconds_total", "seconds by part of the step", "part")
        self.tokens = self.counter("learner_tokens_total", "completion tokens trained on")
        self.skipped = self.counter("learner_skipped_steps_total", "batches without a step", "reason")
        self.checkpoint_step = self.gauge("learner_checkpoint_step", "step of the newest durable checkpoint")
        self.checkpoint_seconds = self.gauge("learner_checkpoint_seconds", "time that writing it took")
        self.evaluation = self.gauge("learner_evaluation_reward", "mean reward of the newest evaluation", "set")
        self._reported: dict[str, Gauge] = {}

    def checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint is durable; what the learner itself waited for it is the part `checkpoint` of its steps."""
        self.checkpoint_step.set(step)
        self.checkpoint_seconds.set(seconds)

    def report(self, values: Mapping[str, float]) -> None:
        """Show figures of the last step, by their own names."""
        for name, value in values.items():
            self._gauge(f"learner_{name}", f"{name.replace('_', ' ')} of the last step").set(value)

    def objective(self, values: Mapping[str, float]) -> None:
        """Show the objective's metrics of the last step; a name may carry one label, `name{key="value"}`."""
        for full, value in values.items():
            name, _, label = full.removeprefix("slipstream_").partition("{")
            key, _, content = label.rstrip("}").partition("=")
            gauge = self._gauge(name, f"{name.replace('_', ' ')} of the last step", *([key] if key else []))
            (gauge.labels(content.strip('"')) if key else gauge).set(value)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        if name not in self._reported:
            self._reported[name] = self.gauge(name, what, *labels)
        return self._reported[name]
