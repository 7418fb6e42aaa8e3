"""A page that shows a cache while it works: an ASGI application, served by the program or by the cache itself."""

from tiered_kv.telemetry.page.application import Page

__all__ = ["Page"]
