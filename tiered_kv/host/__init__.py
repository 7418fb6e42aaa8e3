"""One cache for a host: a server owns the tiers, and engines in other processes, or containers, attach to it.

In the server, `server` listens and keeps one cache for each model (`shares`); `session` serves one client, whose memory
is far (`session_transfers`). In the engine's process `client` has the face of `TieredKV`, `asked_calls` what it has the
server answer, `connection` keeps it attached, by one `attachment` after the other, and `client_transfers` copies. A
connection begins with a `handshake`; then messages of `protocol` pass, in the encoding of `wire`, and blocks through
memory that both have mapped.
"""
