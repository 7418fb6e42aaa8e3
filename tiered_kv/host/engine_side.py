"""What a client has in its own process while it is open, whatever server there is: memory, a device, and transfers."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tiered_kv.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.host.opening import Attached
from tiered_kv.keys import BlockKeys
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.codec import Codec, make_codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.lanes import Lanes
from tiered_kv.memory.make import DeviceLike, make_device
from tiered_kv.tiers.tasks import Tasks, in_a_thread
from tiered_kv.transfers.bindings import Bindings
from tiered_kv.transfers.submissions import Submissions
from tiered_kv.validation import check_keys


@dataclass(frozen=True)
class FarGroup:
    """One KV group, as memory is bound to it."""

    group: KVGroup
    codec: Codec | None
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    gpu: None = None


class EngineSide:
    """All of it. `lifetime` ends it."""

    def __init__(self, device: DeviceLike, layout: KVLayout, codec: str, loop_calls: LoopCalls) -> None:
        """Begin, for a server that keeps blocks as ``codec`` says."""
        self.loop = asyncio.get_running_loop()
        self.codec = codec
        self.loop_calls = loop_calls
        self.lifetime = AsyncExitStack()
        self.tasks = Tasks()
        self.bindings = Bindings()
        self.submissions = Submissions(loop_calls)
        self.device = device if isinstance(device, Device) else make_device(device)
        if self.device is not device:
            self.lifetime.push_async_callback(in_a_thread, loop_calls, self.device.close, 1.0)
        h2d, d2h = Lanes(self.device, "h2d"), Lanes(self.device, "d2h")
        self.lifetime.callback(h2d.close)
        self.lifetime.callback(d2h.close)
        self.lifetime.callback(self.bindings.forget)
        self.groups = [FarGroup(each, make_codec(codec, each), h2d, d2h, loop_calls) for each in layout.groups]

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
        if attached.codec != self.codec:
            raise ConfigurationError(f"the server keeps blocks as {attached.codec!r} now, it was {self.codec!r}")
        for slab in attached.slabs:
            group = self.groups[slab.group]
            wanted = group.codec.stored_bytes if group.codec else group.group.payload_bytes
            if slab.payload_bytes != wanted:
                raise LayoutMismatchError(f"the server's slots hold {slab.payload_bytes} bytes, a block has {wanted}")

    def check_loop(self, *, anywhere: bool = False) -> None:
        """Raise unless this is the event loop that opened the client, or the call may come from ``anywhere``."""
        if self.loop.is_closed():
            raise ClosedError("the event loop that opened this TieredKV is closed")
        if anywhere:
            return
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_here = False
        if not is_here:
            raise ConfigurationError(
                "a TieredKV is called on the event loop that opened it; other threads use submit_load, submit_store, "
                "poll, lookup_nowait and membership"
            )
