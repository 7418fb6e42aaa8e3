"""Spans as OpenTelemetry's SDK would export them."""

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is missing: pip install opentelemetry-sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import CPUTier
from tiered_kv.telemetry import Spans


async def test_a_lookup_and_a_prefetch_are_spans_too() -> None:
    """With what was found, and where; with what was moved, and to where; each within its caller's."""
    exported, engine, shared = InMemorySpanExporter(), Engine(), ScriptedBackend(name="shared")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    async with open_cache(CPUTier(capacity=16 * PAYLOAD_BYTES), shared, engine=engine, emit=[Spans(provider)]) as kv:
        await keep(kv, engine, prompt(4))
        await kv.evict(prompt(4)[2:], tier="cpu")
        exported.clear()
        with provider.get_tracer("test").start_as_current_span("request"):
            await kv.lookup(prompt(6))
            await kv.prefetch(prompt(4))
    lookup, prefetch, request = exported.get_finished_spans()
    assert (lookup.name, prefetch.name) == ("tiered_kv.lookup", "tiered_kv.prefetch")
    assert lookup.attributes == {
        "tiered_kv.requested_blocks": 6,
        "tiered_kv.blocks": 4,
        "tiered_kv.blocks.cpu": 2,
        "tiered_kv.blocks.shared": 2,
    }
    assert prefetch.attributes == {"tiered_kv.blocks": 4, "tiered_kv.moved_blocks": 2, "tiered_kv.target": "cpu"}
    assert request.context is not None
    for span in (lookup, prefetch):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert (span.start_time or 0) <= (span.end_time or 0)


async def test_each_load_and_store_is_a_span_within_its_callers() -> None:
    """From the call to the end of its transfer, with where blocks came from, and why others did not come."""
    exported, engine = InMemorySpanExporter(), Engine()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    async with open_cache(CPUTier(capacity=16 * PAYLOAD_BYTES), engine=engine, emit=[Spans(provider)]) as kv:
        with provider.get_tracer("test").start_as_current_span("request"):
            await keep(kv, engine, prompt(4))
            await kv.load(prompt(6), engine.compute(prompt(6)))
    store, load, request = exported.get_finished_spans()
    assert (store.name, load.name) == ("tiered_kv.store", "tiered_kv.load")
    assert store.attributes is not None
    assert store.attributes["tiered_kv.blocks"] == 4
    assert load.attributes is not None
    assert load.attributes["tiered_kv.blocks.cpu"] == 4
    assert load.attributes["tiered_kv.missed_because"] == "never stored"
    assert request.context is not None
    for span in (store, load):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
