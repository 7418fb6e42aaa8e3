"""One cache for a host: a server owns the tiers, and engines in other processes, or containers, attach to it.

`server` listens and keeps one cache for each model; `session` serves one client; `client` gives an engine the face of
`TieredKV`. What passes between them is in `wire`, and blocks pass through memory that both have mapped.
"""
