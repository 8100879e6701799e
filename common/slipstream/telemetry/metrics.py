"""The metrics of every role; `docs/metrics.md` is made from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prometheus_client import Gauge

from slipstream.telemetry.registry import Load, Metrics

__all__ = ["STAGES", "BufferMetrics", "LearnerMetrics", "Metrics", "RewardMetrics", "RolloutMetrics"]

# what can hold a run back; the first and the two last make the speed limit max(T_generate, T_train, T_sync)
STAGES = ("generate", "reward", "data", "train", "sync")
_TOKENS = [2**power for power in range(2, 17)]
_SECONDS = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400, 1000]


class RolloutMetrics(Metrics):
    """A generator replica."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.counter("rollout_tokens_total", "completion tokens sampled")
        self.sample_tokens = self.histogram("rollout_sample_tokens", "completion tokens of a sample", _TOKENS)
        self.group_seconds = self.histogram("rollout_group_seconds", "seconds to sample a group", _SECONDS)
        self.groups = self.counter("rollout_groups_total", "groups by how they ended", "end")
        self.in_flight = self.gauge("rollout_groups_in_flight", "groups being sampled or not yet stored")
        self.undelivered = self.gauge("rollout_groups_waiting", "sampled groups that wait to be stored")
        self.version = self.gauge("rollout_version", "version of the weights being served")
        self.swaps = self.counter("rollout_swaps_total", "weights swapped in")
        self.swap_seconds = self.counter("rollout_swap_seconds_total", "seconds spent swapping weights")
        self.fetches = self.counter("weights_fetches_total", "versions fetched, by how it ended", "end")
        self.fetched = self.counter("weights_fetched_bytes_total", "bytes of the versions fetched and verified")
        self.fetch_seconds = self.counter("weights_fetch_seconds_total", "seconds spent fetching and verifying")
        self.slots = self.gauge("rollout_slots", "sequences that can be decoded at once")
        self.load = Load()
        what = "sequences being decoded, times seconds; its rate over rollout_slots is how busy the replica is"
        self.pulled("counter", "rollout_slot_seconds_total", what, lambda: [((), self.load.seconds)])
        self._made = time.monotonic()
        self._tokens = self._swap_seconds = self._groups = 0.0

    def sampled(self, tokens: Sequence[int], seconds: float, begun: int = 0) -> None:
        """A group has been sampled: tokens of each sample, `begun` of them elsewhere, and the time it took."""
        self.handed_over(max(0, sum(tokens) - begun))
        for count in tokens:
            self.sample_tokens.observe(count)
        self.group_seconds.observe(seconds)
        self._groups += 1

    def handed_over(self, tokens: int) -> None:
        """So many tokens were sampled here, of a group that is finished elsewhere."""
        self.tokens.inc(tokens)
        self._tokens += tokens

    def swapped(self, version: int, seconds: float) -> None:
        """Another version is being served."""
        self.version.set(version)
        self.swaps.inc()
        self.swap_seconds.inc(seconds)
        self._swap_seconds += seconds

    def engaged(self, sequences: int, slots: int) -> None:
        """How many sequences are being decoded, of how many that could be."""
        self.load.set(sequences)
        self._slots = slots
        self.slots.set(slots)

    _slots = 0

    def detail(self) -> dict[str, float]:
        """Up to now: seconds up, busy slots times seconds, tokens, groups and swap seconds; slots and load."""
        return {
            "up": round(time.monotonic() - self._made, 3),
            "busy": round(self.load.seconds, 3),
            "slots": self._slots,
            "load": self.load.amount,
            "tokens": self._tokens,
            "groups": self._groups,
            "swap": round(self._swap_seconds, 3),
        }


class RewardMetrics(Metrics):
    """A reward replica."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = self.counter("reward_samples_total", "samples scored")
        self.unscored = self.counter("reward_unscored_total", "samples that could not be scored", "reason")
        self.refused = self.counter("reward_refused_total", "messages refused")
        self.seconds = self.counter("reward_seconds_total", "seconds spent scoring")
        self.group_seconds = self.histogram("reward_group_seconds", "seconds to score a group", _SECONDS)
        self.in_hand = Load()
        self._busy = Load()
        self._made = time.monotonic()
        self._groups = 0
        self.pulled(
            "gauge", "reward_groups_in_hand", "groups being scored", lambda: [((), self.in_hand.amount)]
        )
        what = "seconds with at least one group being scored"
        self.pulled("counter", "reward_busy_seconds_total", what, lambda: [((), self._busy.seconds)])

    def scoring(self, change: int) -> None:
        """One group more or less is being scored."""
        self.in_hand.set(self.in_hand.amount + change)
        self._busy.set(float(self.in_hand.amount > 0))

    def scored(self, seconds: float) -> None:
        """A group has been scored."""
        self.seconds.inc(seconds)
        self.group_seconds.observe(seconds)
        self._groups += 1

    def detail(self) -> dict[str, float]:
        """Up to now: seconds up, seconds with something to score, groups; and what is being scored."""
        return {
            "up": round(time.monotonic() - self._made, 3),
            "busy": round(self._busy.seconds, 3),
            "slots": 1,
            "load": self.in_hand.amount,
            "groups": self._groups,
        }


class BufferMetrics(Metrics):
    """A buffer shard."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = self.gauge("buffer_groups", "groups stored")
        self.tokens = self.gauge("buffer_tokens", "completion tokens stored")
        self.ready = self.gauge("buffer_ready_groups", "stored groups that no step has taken")
        self.bytes = self.gauge("buffer_bytes", "bytes of the groups stored")
        self.received = self.counter("buffer_received_total", "groups by what became of them", "end")
        self.signal = self.counter(
            "buffer_signal_total", "groups by mixed, all_right or all_wrong rewards", "signal"
        )
        self.repaired = self.counter(
            "buffer_repaired_total", "groups on which shard and ledger did not agree, by how", "how"
        )
        self.lost = self.counter(
            "buffer_lost_total", "groups that the store had lost; they are rolled out anew"
        )
        self.damaged = self.counter(
            "buffer_damaged_total", "groups whose bytes had changed on the disk; they count as lost"
        )


class LearnerMetrics(Metrics):
    """The learner. The objective's own metrics are added when the first step reports them."""

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("learner_step", "steps made, each on one batch")
        self.steps = self.gauge("learner_planned_steps", "steps that the run is to make")
        self.version = self.gauge("learner_version", "newest version published")
        self.seconds = self.counter("learner_seconds_total", "seconds by part of the step", "part")
        self.tokens = self.counter("learner_tokens_total", "completion tokens trained on")
        self.samples = self.counter("learner_samples_total", "samples of the batches trained on")
        self.groups = self.counter("learner_groups_total", "groups of the batches trained on")
        self.bad_replies = self.counter(
            "learner_bad_replies_total", "answers of a buffer that made no sense, by member", "peer"
        )
        self.skipped = self.counter(
            "learner_skipped_steps_total", "batches that were no step and were set aside", "reason"
        )
        self.updates = self.counter(
            "learner_updates_total", "optimizer steps made; learner.n_mini of them a batch"
        )
        what = "optimizer steps not made on their part of a batch"
        self.skipped_updates = self.counter("learner_skipped_updates_total", what, "reason")
        what = "share of the last batch's samples that carry no gradient and skipped the model"
        self.skipped_share = self.gauge("learner_skipped_samples_ratio", what)
        what = "factor on the learning rate for a small effective sample size; 0 without a governor"
        self.governor_factor = self.gauge("learner_governor_factor_ratio", what)
        what = "age up to which tokens of the next step keep their weight; 0 without a governor"
        self.governor_bound = self.gauge("learner_governor_bound_versions", what)
        what = "work of the busiest rank over the mean of all in the last step, less 1"
        self.imbalance = self.gauge("learner_imbalance_ratio", what)
        self.checkpoint_step = self.gauge("learner_checkpoint_step", "step of the newest durable checkpoint")
        what = "time of the newest durable checkpoint, seconds since the epoch; 0 before the first"
        self.checkpoint_time = self.gauge("learner_checkpoint_timestamp_seconds", what)
        self.checkpoint_seconds = self.gauge("learner_checkpoint_seconds", "time that writing it took")
        what = "checkpoints copied to learner.checkpoint.upload, and attempts that failed"
        self.uploads = self.counter("learner_checkpoint_uploads_total", what, "result")
        self.evaluation = self.gauge("learner_evaluation_reward", "mean reward of the newest evaluation", "set")
        self.reward = self.gauge("learner_reward", "mean reward of the last step")
        self.component = self.gauge(
            "learner_reward_component", "mean of a reward of the last step", "component"
        )
        self.response = self.gauge("learner_response_tokens", "mean completion tokens of the last step")
        self.gradient_norm = self.gauge("learner_gradient_norm", "gradient norm before clipping")
        self.learning_rate = self.gauge("learner_learning_rate", "learning rate of the last step")
        self.age_mean = self.gauge("learner_age_mean_versions", "mean age of the groups' oldest tokens")
        self.age_max = self.gauge("learner_age_max_versions", "age of the last step's oldest token")
        what = "share of the last step's groups whose oldest token is over staleness.max_staleness"
        self.over_bound = self.gauge("learner_over_bound_groups_ratio", what)
        what = "share of the last step's tokens over staleness.max_staleness; with weight only under pace"
        self.tokens_over_bound = self.gauge("learner_over_bound_tokens_ratio", what)
        self._reported: dict[str, Gauge] = {}
        self._make_pipeline()

    def _make_pipeline(self) -> None:
        """Where the time goes, and what travels."""
        what = "seconds that the last steps' work takes this stage by itself, a step"
        self.stage_seconds = self.gauge("pipeline_stage_seconds", what, "stage")
        what = (
            "share of the time in which this stage was what the run waited for or nearly so: its load, 0 to 1"
        )
        self.bound = self.gauge("pipeline_bound_ratio", what, "stage")
        what = "share of the speed limit max(T_generate, T_train, T_sync) that the last steps reached"
        self.limit = self.gauge("pipeline_limit_ratio", what)
        self.version_bytes = self.gauge("weights_version_bytes", "bytes of one version")
        what = "bytes that a replica with the version before has to fetch, as a share of all; 1 without deltas"
        self.delta = self.gauge("weights_delta_ratio", what)

    def checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint is durable; what the learner itself waited for it is the part `checkpoint` of its steps."""
        self.checkpoint_step.set(step)
        self.checkpoint_seconds.set(seconds)
        self.checkpoint_time.set(time.time())

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
