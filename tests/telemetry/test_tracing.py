"""A ticket's spans, from several processes, in one trace that names it."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from slipstream.errors import UserError
from slipstream.telemetry import tracing

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is missing (extra: otel)")


async def test_spans_of_all_roles_share_the_ticket_s_trace():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = []
    for who, name in (
        ("rollout-0", "admit"),
        ("rollout-0", "generate"),
        ("reward-1", "score"),
        ("buffer", "store"),
        ("learner", "train"),
    ):
        exporter = InMemorySpanExporter()
        async with AsyncExitStack() as stack:
            tracing.set_up(None, "r", who, stack, exporter)
            if name == "admit":
                tracing.admitted("r", 41, 1, 0.5)
            else:
                tracing.span(name, "r", 41, 1, 0.5, tokens=12)
            stack.push_async_callback(_keep, found, exporter)
    root, *parts = found
    assert [span.name for span in parts] == ["generate", "score", "store", "train"]
    assert (root.name, root.parent, root.context.span_id) == ("admit", None, 2)  # the attempt
    assert {span.context.trace_id for span in found} == {tracing.trace_id("r", 41)}
    assert {span.context.trace_id & (2**64 - 1) for span in found} == {42}
    assert {span.parent.span_id for span in parts} == {root.context.span_id}
    assert len({span.context.span_id for span in found}) == len(found)
    assert found[0].end_time - found[0].start_time == 500_000_000
    assert found[2].resource.attributes["service.name"] == "slipstream-reward"
    assert found[4].attributes["slipstream.ticket"] == 41
    tracing.span("train", "r", 1, 0, 0.1)
    tracing.admitted("r", 1, 0, 0.1)


async def _keep(found, exporter):
    from slipstream.telemetry.tracing import _tracer

    _tracer.span_processor.force_flush()
    found.extend(exporter.get_finished_spans())


def test_runs_do_not_share_traces():
    assert tracing.trace_id("a", 0) != tracing.trace_id("b", 0)
    assert tracing.trace_id("a", 0) & (2**64 - 1) == 1


async def test_a_missing_exporter_is_named_with_its_extra():
    async with AsyncExitStack() as stack:
        try:
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401
        except ImportError:
            with pytest.raises(
                UserError, match=r"telemetry.otlp_endpoint needs .*pip install '.*opentelemetry-sdk"
            ):
                tracing.set_up("http://localhost:4318", "r", "learner", stack)
        else:
            tracing.set_up("http://localhost:4318", "r", "learner", stack)
        tracing.set_up(None, "r", "learner", stack)
