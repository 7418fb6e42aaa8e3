"""Servers that say more to redis-py than it is to keep."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tiered_kv.testing import open_context
from tiered_kv.values.errors import TieredKVError
from tiered_kv_backends.redis import RedisBackend, delete_tenant
from tiered_kv_backends.redis.servers import MOST_BYTES

MUCH_BYTES = 4 * MOST_BYTES
"""After which the server gives up; what lies in buffers of the system is far less."""
REPLIES = {"a string": b"$%d\r\n" % MUCH_BYTES, "an array": b"*20000000\r\n", "a line": b"+"}


@contextmanager
def talkative(reply: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield the port of a server that answers whatever is asked by a reply without end, and what each client took."""
    taken: list[int] = []

    def serve() -> None:
        with suppress(OSError):  # the listener's end is the server's
            while True:
                client, _ = listener.accept()
                number = len(taken)
                taken.append(0)
                with client, suppress(OSError):
                    client.recv(65536)
                    said = reply + b":1\r\n" * (1 << 14) if reply.startswith(b"*") else reply + b"x" * (1 << 16)
                    while said and taken[number] < MUCH_BYTES:
                        num_sent = client.send(said)
                        taken[number] += num_sent
                        said = said[num_sent:] or said[len(reply) :]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], taken
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("kind", ["cluster", "sentinel", "tenant"])
async def test_no_reply_is_kept_that_does_not_end(kind: str, reply: str) -> None:
    """Whoever answers questions about the whole of a server, the connection ends before much is kept of it."""
    with talkative(REPLIES[reply]) as (port, taken), pytest.raises(TieredKVError):
        await ask(kind, {"url": f"redis://127.0.0.1:{port}", "connect_timeout_s": 20})
    assert taken
    assert max(taken) < MUCH_BYTES


async def ask(kind: str, settings: dict[str, object]) -> None:
    """Ask something that redis-py asks for us."""
    if kind == "tenant":
        await delete_tenant(settings, "ann")
        return
    settings |= {"cluster": True, "timeout_s": 200} if kind == "cluster" else {"sentinel_master": "kv"}
    with open_context() as context:
        await RedisBackend(settings).open(context)
