from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from slipstream.config.schema import Config
from slipstream.learner.descent import Line
from slipstream.learner.report.record import of_all_groups, progress_line, step_record
from slipstream.learner.report.telling import Telling
from slipstream.learner.service import Learner
from slipstream.learner.step.step_report import StepReport
from slipstream.ledger.counts import Counts
from slipstream.run.folder import RunFolder
from slipstream.telemetry.metrics import LearnerMetrics


def sample(reward, **components):
    return SimpleNamespace(reward=reward, components=components, tokens=4)


def group(*samples):
    return SimpleNamespace(
        samples=samples,
        scored_rewards=[each.reward for each in samples if each.reward is not None],
        oldest_version=3,
        generate_seconds=1.0,
        score_seconds=0.5,
        ticket=1,
        attempt=0,
    )


@pytest.fixture
def record():
    batch = [
        (group(sample(1.5, right=1.0, form=0.5), sample(0.5, right=0.0, form=0.5)), None),
        (group(sample(1.0, right=1.0, form=None), sample(None, right=None)), None),
    ]
    report = StepReport(stepped=True, groups=2, gradient_norm=0.25)
    return step_record(Line(5, 5), 4, batch, report, 2.0) | of_all_groups(Counts.read(9, {}), 0)


@pytest.mark.parametrize(
    ("steps", "pace", "left"),
    [(10, 2.0, "  10 s left"), (65, 2.0, "  2 min left"), (5005, 2.0, "  2.8 h left"), (None, 2.0, "")],
)
def test_a_progress_line_says_how_long_it_will_take(record, steps, pace, left):
    line = progress_line(record, steps, pace)
    assert line.startswith(f"step 5{f'/{steps}' if steps else ''}  version 5  reward 1.000")
    assert line.endswith(f"work 0.00){left}")


def test_a_progress_line_shows_the_gradient_and_with_a_reference_the_distance_from_it(record):
    assert "  gradient norm 0.25  " in progress_line(record, 9, 1.0)
    near = record | {"metrics": {"slipstream_objective_kl_nats": 0.00123}}
    assert "  gradient norm 0.25  kl 0.00123  " in progress_line(near, 9, 1.0)
    assert "  gradient norm not finite  " in progress_line(record | {"gradient_norm": None}, 9, 1.0)


def test_what_no_batch_shows_stands_in_the_line_and_in_the_record(record):
    """Groups that are dropped reach no batch, and their samples are gone all the same."""
    counters = {"unscored/timeout": "5", "unscored/exception": "2", "groups:dropped:unscored": "1"}
    record |= of_all_groups(Counts.read(9, counters), 3)
    assert record["unscored"] == 4
    assert record["unscored_total"] == {"timeout": 5, "exception": 2}
    assert record["dropped_total"] == {"unscored": 1}
    assert "  unscored 4  " in progress_line(record, 9, 1.0)


def test_the_width_of_the_rewards_is_recorded(record):
    assert (record["reward_min"], record["reward_max"]) == (0.5, 1.5)
    nothing = step_record(Line(5, 4), 4, [(group(sample(None)), None)], StepReport(groups=1), 2.0)
    assert (nothing["reward_min"], nothing["reward_max"]) == (None, None)


def test_a_norm_that_is_not_finite_is_recorded_as_none():
    """Case 63: a line of JSON has no NaN, and a step of which a part was skipped for one must be told."""
    report = StepReport(stepped=True, gradient_norm=float("nan"), groups=1)
    record = step_record(Line(5, 5), 4, [(group(sample(1.0)), None)], report, 2.0)
    assert record["gradient_norm"] is None
    json.dumps(record, allow_nan=False)


def test_a_record_says_what_was_left_out():
    report = StepReport(made=1, skips={"nonfinite": 2}, samples=8, gradient_samples=6, groups=1)
    record = step_record(Line(5, 5), 4, [(group(sample(1.0)), None)], report, 2.0)
    assert (record["updates"], record["skipped_updates"], record["skipped_share"]) == (
        1,
        {"nonfinite": 2},
        0.25,
    )


def test_how_evenly_the_ranks_were_busy_reaches_the_line_and_the_metrics(tmp_path):
    """StepReport says it, and whoever looks for a slow rank reads steps.jsonl or the dashboard."""
    report = StepReport(
        stepped=True, groups=1, imbalance=0.125, micro_batches=3, model_tokens=90, padding_tokens=6
    )
    record = step_record(Line(5, 5), 4, [(group(sample(1.0)), None)], report, 2.0)
    kept = {name: record[name] for name in ("imbalance", "micro_batches", "model_tokens", "padding_tokens")}
    assert kept == {"imbalance": 0.125, "micro_batches": 3, "model_tokens": 90, "padding_tokens": 6}
    metrics = LearnerMetrics()
    parts = SimpleNamespace(
        config=Config(), folder=RunFolder(tmp_path, "r"), metrics=metrics, ledger=None, sinks=None
    )
    shape = {"components": {}, "samples": 1, "over_bound_groups": 0.0, "over_bound_tokens": 0.0}
    Telling(parts)._show(record | shape, None)
    assert metrics.registry.get_sample_value("slipstream_learner_imbalance_ratio") == pytest.approx(0.125)


async def test_the_weights_of_a_record_are_gathered_beside_the_event_loop(monkeypatch):
    """With ranks that is common work, and heartbeats must go on meanwhile."""
    policy = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    trainer = SimpleNamespace(tensors=threading.get_ident, policy=policy, ranks=SimpleNamespace(size=1))
    parts = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(record=True)), folder=None, trainer=trainer
    )
    monkeypatch.setattr("slipstream.learner.replay.recording.keep", lambda *given: {"by": given[-2]})
    kept = await Learner._keep_record(SimpleNamespace(_parts=parts), Line(1, 1), 0, [], StepReport())
    assert kept["by"] != threading.get_ident()
