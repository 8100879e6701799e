"""Spans of a ticket's life over OpenTelemetry: admit, generate, score, store, train; the trace's id names the ticket.

Off until `set_up`, and then every process sends its own spans. They share a trace without telling each other of it,
because its id follows from the run and the ticket. An attempt's root is its `admit`, whose id follows from the
attempt, so that the other four know their parent.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from slipstream.errors import UserError, install

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import SpanContext

_tracer: Any = None
_root: SpanContext | None = None  # the ids of the span that is being made, where they are not left to chance


def trace_id(run: str, ticket: int) -> int:
    """128 bits: the run's digest above, the ticket's number plus one below (an id of 0 is none)."""
    digest = hashlib.blake2b(run.encode(), digest_size=8).digest()
    return int.from_bytes(digest) << 64 | (ticket + 1)


def set_up(
    endpoint: str | None, run: str, who: str, stack: AsyncExitStack, exporter: SpanExporter | None = None
) -> None:
    """Send this process's spans to an OTLP endpoint, or to an exporter of a test.

    Raises:
        UserError: The packages are missing.
    """
    global _tracer
    _tracer = None
    if endpoint is None and exporter is None:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=f"{(endpoint or '').rstrip('/')}/v1/traces", timeout=5)
    except ImportError as error:
        raise UserError(
            f"telemetry.otlp_endpoint needs a package that is not installed ({error.name})",
            install("otel"),
        ) from None
    role = who.partition("-")[0]
    names = {"service.name": f"slipstream-{role}", "service.instance.id": who, "slipstream.run": run}
    provider = TracerProvider(
        resource=Resource.create(names), shutdown_on_exit=False, id_generator=_id_generator()
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    stack.callback(provider.shutdown)
    _tracer = provider.get_tracer("slipstream")


def admitted(run: str, ticket: int, attempt: int, seconds: float) -> None:
    """Note that a ticket has just been admitted, by a call that took so long: the root of this attempt's spans."""
    global _root
    if _tracer is None:
        return
    from opentelemetry.context import Context

    try:
        _root = _life(run, ticket, attempt)
        _note("admit", Context(), ticket, attempt, seconds)
    finally:
        _root = None


def span(
    name: str, run: str, ticket: int, attempt: int, seconds: float, **attributes: int | float | str
) -> None:
    """Note that a part of a ticket's life has just ended and took so long; does nothing while tracing is off."""
    if _tracer is None:
        return
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    parent = set_span_in_context(NonRecordingSpan(_life(run, ticket, attempt)))
    _note(name, parent, ticket, attempt, seconds, **attributes)


def _life(run: str, ticket: int, attempt: int) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        trace_id(run, ticket), attempt + 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _note(
    name: str, parent: Context, ticket: int, attempt: int, seconds: float, **attributes: int | float | str
) -> None:
    end = time.time_ns()
    noted = _tracer.start_span(
        name,
        parent,
        start_time=end - round(seconds * 1e9),
        attributes={"slipstream.ticket": ticket, "slipstream.attempt": attempt, **attributes},
    )
    noted.end(end)


def _id_generator() -> IdGenerator:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):  # type: ignore[misc]  # an Any, where the extra is missing
        def generate_trace_id(self) -> int:
            return int(_root.trace_id if _root else super().generate_trace_id())

        def generate_span_id(self) -> int:
            return int(_root.span_id if _root else super().generate_span_id())

    return Ids()
