"""Spans for OpenTelemetry, made from events: one for each call that asks or moves, within the span of whoever called.

Needs OpenTelemetry's API package; what becomes of spans is for the SDK that the program has set up.
"""

import time
from collections.abc import Mapping
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
        if isinstance(event, BlocksLoaded | BlocksLookedUp):
            facts = {
                "tiered_kv.requested_blocks": event.requested,
                "tiered_kv.blocks": event.blocks,
                **{f"tiered_kv.blocks.{tier}": blocks for tier, blocks in event.by_tier.items()},
            }
            is_load = isinstance(event, BlocksLoaded)
            if isinstance(event, BlocksLoaded) and event.missed_because:
                facts["tiered_kv.missed_because"] = event.missed_because
            self._tell("tiered_kv.load" if is_load else "tiered_kv.lookup", event.took_ms, facts)
        elif isinstance(event, BlocksPrefetched):
            facts = {
                "tiered_kv.blocks": event.blocks,
                "tiered_kv.moved_blocks": event.moved,
                "tiered_kv.target": event.target,
            }
            self._tell("tiered_kv.prefetch", event.took_ms, facts)
        elif isinstance(event, BlocksStored):
            facts = {
                "tiered_kv.blocks": event.blocks,
                "tiered_kv.present_blocks": event.present,
                "tiered_kv.dropped_blocks": event.dropped,
            }
            self._tell("tiered_kv.store", event.took_ms, facts)

    def _tell(self, name: str, took_ms: float, facts: Mapping[str, int | str]) -> None:
        stop = time.time_ns()
        span = self._tracer.start_span(name, start_time=stop - int(took_ms * 1e6), attributes=facts)
        span.end(stop)
