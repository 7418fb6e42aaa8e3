"""Spans for OpenTelemetry, made from events: one for each call that asks or moves, within the span of whoever called.

Needs OpenTelemetry's API package; what becomes of spans is for the SDK that the program has set up.
"""

import time
from typing import TYPE_CHECKING

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import BlocksLoaded, BlocksLookedUp, BlocksPrefetched, BlocksStored, Event

if TYPE_CHECKING:  # the package may not be installed
    from opentelemetry.trace import Tracer, TracerProvider


class Spans:
    """A receiver of events for `TieredKV`'s ``emit``: ``emit=[log_event, Spans()]``.

    A span begins with the call and ends with its transfer: ``tiered_kv.lookup``, ``tiered_kv.load``,
    ``tiered_kv.prefetch`` and ``tiered_kv.store``, with blocks by tier, and why the rest of a load was missed.
    """

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        """Make a receiver that has seen no event.

        Args:
            provider: Of tracers; OpenTelemetry's global one by default.

        Raises:
            ConfigurationError: OpenTelemetry's API package is not installed.
        """
        try:
            from opentelemetry.trace import get_tracer  # noqa: PLC0415 - may not be installed
        except ImportError as error:
            raise ConfigurationError("spans need OpenTelemetry: pip install opentelemetry-api") from error
        self._tracer: Tracer = get_tracer("tiered_kv", tracer_provider=provider)

    def __call__(self, event: Event) -> None:
        """Take an event; called by the cache."""
        facts: dict[str, int | str]
        match event:
            case BlocksLoaded() | BlocksLookedUp():
                by_tier = {f"blocks.{tier}": blocks for tier, blocks in event.by_tier.items()}
                name, facts = "lookup", {"requested_blocks": event.requested, "blocks": event.blocks, **by_tier}
                if isinstance(event, BlocksLoaded):
                    name = "load"
                    if event.missed_because:
                        facts["missed_because"] = event.missed_because
            case BlocksPrefetched():
                name = "prefetch"
                facts = {"blocks": event.blocks, "moved_blocks": event.moved, "target": event.target}
            case BlocksStored():
                name = "store"
                facts = {"blocks": event.blocks, "present_blocks": event.present, "dropped_blocks": event.dropped}
            case _:
                return
        stop, attributes = time.time_ns(), {f"tiered_kv.{fact}": value for fact, value in facts.items()}
        start = stop - int(event.took_ms * 1e6)
        self._tracer.start_span(f"tiered_kv.{name}", start_time=start, attributes=attributes).end(stop)
