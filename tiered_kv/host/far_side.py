"""What a client has in its own process while it is open, whatever server there is: memory, a device, and transfers."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from tiered_kv.engine_side import EngineSide
from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.events import Emit
from tiered_kv.host.opening import Attached
from tiered_kv.keys import BlockKeys, Shard
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.codec import Codec, make_codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.lanes import Lanes
from tiered_kv.memory.make import DeviceLike, make_device
from tiered_kv.tiers.tasks import Tasks, in_a_thread
from tiered_kv.transfers.swap import SwapSide, SwapSpace, SwapSpaces
from tiered_kv.validation import check_keys, check_one_rank


@dataclass(frozen=True)
class FarGroup:
    """One KV group, as memory is bound to it."""

    group: KVGroup
    codec: Codec | None
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    gpu: None = None


class FarSide(EngineSide):
    """All of it. `lifetime` ends it."""

    reads_direct: ClassVar = False

    def __init__(
        self,
        device: DeviceLike,
        layout: KVLayout,
        shards: Sequence[Shard],
        emit: Emit,
        attached: Attached,
        loop_calls: LoopCalls,
    ) -> None:
        """Begin, as the first server says that it keeps blocks."""
        lifetime = AsyncExitStack()
        self.device = device if isinstance(device, Device) else make_device(device)
        if self.device is not device:
            lifetime.push_async_callback(in_a_thread, loop_calls, self.device.close, 1.0)
        h2d, d2h = Lanes(self.device, "h2d"), Lanes(self.device, "d2h")
        lifetime.callback(h2d.close)
        lifetime.callback(d2h.close)
        super().__init__(shards, Tasks(), loop_calls, lifetime)
        self.attached = attached
        self.swaps = SwapSpaces()
        self.loop_calls = loop_calls
        self._emit = emit
        self.groups = [FarGroup(each, make_codec(attached.codec, each), h2d, d2h, loop_calls) for each in layout.groups]

    @override
    def of_rank(self, group: int) -> FarGroup:
        check_one_rank(self.shards)
        return self.group(group)

    @override
    def swap_space(self, group: int) -> SwapSpace:
        """The slots are in this process's memory, and there whatever the server does."""
        self.of_rank(group)
        side = SwapSide(self.device, self.loop_calls, self._emit, self.attached.window_bytes)
        caches = self.bindings.caches_of(group)
        return self.swaps.of(group, side, caches, self.attached.swap_space_bytes, self.lifetime)

    @override
    def deadline(self, deadline_s: float | None) -> float:
        return self.loop.time() + (self.attached.load_timeout_s if deadline_s is None else deadline_s)

    def group(self, group: int) -> FarGroup:
        """Return a KV group.

        Raises:
            ConfigurationError: The layout has none of this number.
        """
        if not 0 <= group < len(self.groups):
            raise ConfigurationError(f"KV group {group} of {len(self.groups)}: the layout has no such group")
        return self.groups[group]

    def check(self, keys: BlockKeys) -> None:
        """Raise unless these are keys of this layout."""
        if not isinstance(keys, BlockKeys):
            raise ConfigurationError(
                f"keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), got {type(keys).__name__}"
            )
        check_keys(keys, self.group(keys.group).group)

    def check_server(self, attached: Attached) -> None:
        """Raise unless a server keeps blocks as memory is bound for here."""
        now, was = attached.codec, self.attached.codec
        if now != was:
            raise ConfigurationError(f"the server keeps blocks as {now!r} now, it was {was!r}")
        for slab in attached.slabs:
            group = self.groups[slab.group]
            wanted = group.codec.stored_bytes if group.codec else group.group.payload_bytes
            if slab.payload_bytes != wanted:
                raise LayoutMismatchError(f"the server's slots hold {slab.payload_bytes} bytes, a block has {wanted}")
