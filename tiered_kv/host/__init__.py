"""One cache for a host: a server owns the tiers, and engines in other processes, or containers, attach to it.

In the server, `server` listens and keeps one cache for each model (`shares`); `session` serves one client, whose memory
is `far`. In the engine's process `client` has the face of `TieredKV`, `connection` keeps it attached, by one
`attachment` after the other, and `moving` copies. A connection begins with a `handshake` (`opening` has its messages);
then `messages` pass over a `link`, in the encoding of `wire`, and blocks through memory that both have mapped.
"""
