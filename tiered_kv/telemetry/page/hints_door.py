"""KV hints by HTTP: for orchestrators that are not in a request's way, off unless there is a token for them.

Who has the token speaks for every tenant, and is bounded for each: nobody's hints take the room of the others.
"""

import asyncio
import hmac
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from tiered_kv.settings.page_address import checked_token
from tiered_kv.telemetry.watch import Hinted, Watch
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.hints import HintAction, blocks_meant, envelope_in, read_hints
from tiered_kv.values.keys import BlockKeys

_SCHEME: Final = b"bearer "


class HintsDoor:
    """Takes hints of blocks that are named in them, for one cache."""

    def __init__(self, token: str) -> None:
        """Take hints from whoever has the token.

        Raises:
            ConfigurationError: As `checked_token` does.
        """
        self._token = checked_token(token).encode()
        self._hinted: Hinted | None = None  # made by the first hint
        self._counts = dict.fromkeys(("actions", "ignored", "blocks", "blocks_refused"), 0)

    @property
    def counts(self) -> Mapping[str, int]:
        """Actions that are acted on, those that are not understood or too many, and what became of blocks."""
        return self._counts

    def lets_in(self, headers: Mapping[bytes, bytes]) -> bool:
        """Say whether a request has the token."""
        said = headers.get(b"authorization", b"")
        is_scheme = said[: len(_SCHEME)].lower() == _SCHEME
        return hmac.compare_digest(said[len(_SCHEME) :].strip(), self._token) and is_scheme

    async def take(self, watch: Watch, keys: BlockKeys, asked: Mapping[str, Any]) -> dict[str, int] | None:
        """Begin with what is asked of blocks; return what was understood, or None if too many wait.

        It is read in a thread: the event loop may be the cache's own, and there may be much of it.

        Args:
            watch: Of the cache.
            keys: The blocks.
            asked: Has ``kv_hints``, the ``salt``, where an action is about answers alone ``prompt_tokens``, and where
                ``keys`` are of ``hashes`` these.

        Raises:
            ConfigurationError: There is no envelope, or the cache has no CPU tier.
            ClosedError: It is closed.
        """
        envelope, num_tokens = envelope_in(asked), len(keys) * keys.block_size
        prompt_tokens = asked.get("prompt_tokens", num_tokens)
        if not isinstance(envelope, Mapping) or type(prompt_tokens) is not int or prompt_tokens < 0:
            raise ConfigurationError('ask with "kv_hints", an envelope with "actions"; "prompt_tokens" is a number')
        names = asked.get("hashes")
        meant, num_actions, num_ignored = await asyncio.to_thread(_read, envelope, keys, names, prompt_tokens)
        begin = partial(self._begin, watch, meant, asked.get("salt", ""), (num_actions, num_ignored))
        if not await watch.ask(begin):
            return None
        return {"actions": num_actions, "ignored": num_ignored}

    async def _begin(
        self, watch: Watch, meant: Sequence[tuple[HintAction, BlockKeys]], salt: str, counts: tuple[int, int]
    ) -> bool:
        if self._hinted is None:
            self._hinted = watch.make_hinted(self._favoured)
        if self._hinted is None:
            raise ConfigurationError("this cache has no CPU tier, and hints are bounded by a part of that")
        has_begun = not meant or self._hinted.begin(meant, salt)
        num_actions, num_ignored = counts
        self._counts["actions"] += num_actions if has_begun else 0
        self._counts["ignored"] += num_ignored + (0 if has_begun else num_actions)
        return has_begun

    def _favoured(self, num_blocks: int, num_refused: int) -> None:
        self._counts["blocks"] += num_blocks
        self._counts["blocks_refused"] += num_refused

    async def end(self) -> None:
        """End what waits; on the cache's event loop."""
        if self._hinted is not None:
            await self._hinted.aclose()


def _read(
    envelope: object, keys: BlockKeys, names: Sequence[str] | None, prompt_tokens: int
) -> tuple[list[tuple[HintAction, BlockKeys]], int, int]:
    """Return what is meant of blocks, of how many actions, and how many are not understood."""
    actions, num_ignored = read_hints(envelope)
    # Not as the keys have them, where these were given: there short ones end in zeros.
    hashes = list(keys) if names is None else [bytes.fromhex(each) for each in names]
    meant = blocks_meant(actions, hashes, block_size=keys.block_size, num_prompt_tokens=prompt_tokens)
    return [(action, keys[blocks.start : blocks.stop]) for action, blocks in meant], len(actions), num_ignored
