"""How much redis-py may be told: it keeps whatever a server sends, until a reply is whole."""

from typing import Any, Final

from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as LostError

MOST_BYTES: Final = 16 << 20
"""Of one reply: a thousand nodes of a cluster say less of themselves."""


class BoundedParser(DefaultParser):  # type: ignore[valid-type,misc]  # a class all the same, of two that it may be
    """Reads replies by hiredis, which comes with the extra, and gives up a connection that says too much."""

    _num_read = 0

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever redis-py gives and gets
        """Read one reply."""
        self._num_read = 0
        return await super().read_response(*args, **kwargs)

    async def read_from_socket(self) -> bool:
        """Receive what comes next."""
        data = await self._stream.read(self._read_size)
        self._num_read += len(data)
        if not data or self._num_read > MOST_BYTES:
            raise LostError(f"a reply of over {MOST_BYTES} bytes" if data else "the server closed the connection")
        self._reader.feed(data)
        return True


def bound(*options: dict[str, Any]) -> None:
    """Have connections that are going to be made with these options read replies so."""
    for each in options:
        each["parser_class"] = BoundedParser
