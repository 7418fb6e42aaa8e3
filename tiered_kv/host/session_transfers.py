"""The loads and stores of one client, in the server: ordinary ones of the cache, with the engine's memory far away.

The memory of an engine in another process, as the transfers of this one see it: copies are asked for, not made.

A transfer runs here as any other: it finds blocks, leases or reserves slots, and submits copies to a stream. This
stream sends each as a message and holds its end back until the client has answered, or is gone. So whatever a client
does, a slot that it may be reading or writing is nobody else's.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from tiered_kv.cache.checks import check_kind, check_seconds
from tiered_kv.cache.seat import Seat
from tiered_kv.host import protocol, wire
from tiered_kv.host.protocol import REVOKED, Part
from tiered_kv.memory.device import After, Copy, Done, Stream
from tiered_kv.memory.lanes import Lane, RevokedError
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Priority
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.engine_memory import EngineMemory
from tiered_kv.transfers.handles import Handle, LoadHandle
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.transfer_requests import LoadRequest, Order, StoreRequest
from tiered_kv.values.errors import ConfigurationError, Reason, TierFault
from tiered_kv.values.integers import Ids
from tiered_kv.values.results import LoadResult, StoreResult


class ClientGoneError(Exception):
    """What a copy reports whose client has ended: nothing of it can be trusted."""


class FarCopyError(Exception):
    """What a copy reports that went wrong in the client."""


class FarMemory(EngineMemory, Stream):
    """The engine's side of one transfer. Its pages are positions: the client knows which block is for which key.

    Attributes:
        num_bytes: Of all its blocks, in host slots.
        is_promised: Whether the client knows how it ends once it has copied.
        came_before: Whether it had copied all when it began to serve other weights.
    """

    gpu = None
    direct = None
    is_on_loop = True

    def __init__(self, number: int, num_blocks: int, chain: Chain, send: Callable[[wire.Message], None]) -> None:
        """Ask with ``send`` for the copies of one transfer of so many blocks, to and from host slots of ``chain``."""
        self.name = f"client-{number}"
        self.num_bytes = num_blocks * chain.stride_bytes
        self.is_promised = self.came_before = False
        self._id = number
        self._pool = chain.host.slab.name
        self._send = send
        self._loop_calls = chain.loop_calls
        self._parts: list[Part] = []
        self._dones: dict[int, Done] = {}
        self._num_asked = 0
        self._unsaid: list[protocol.Copy] | None = []  # until `begin`
        self._is_lost = False

    # For transfers.

    @property
    def error(self) -> None:
        """What befalls the client's device, the client says copy by copy."""

    def to_wait_for(self, after: After | None) -> None:
        """Wait for nothing here."""
        if after is not None:
            self.wait(after)

    def wait(self, after: After) -> NoReturn:
        """Events are the client's, and waited for there."""
        raise ConfigurationError(f"{after!r:.80} is of another process")

    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        """Have the client copy blocks out of its pages."""
        self._ask(slots, pages, layers)

    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        """Have the client copy blocks into its pages."""
        self._ask(slots, pages, layers)

    def submit(self, copy: Copy, done: Done) -> After:
        """Send what ``copy`` asks for; ``done`` comes with the client's answer, or its end."""
        self._parts = []
        copy()
        if self._is_lost:
            self._loop_calls.call(done, ClientGoneError())
        elif not self._parts:
            self._loop_calls.call(done, None)
        else:
            number, self._num_asked = self._num_asked, self._num_asked + 1
            self._dones[number] = done
            self._say(protocol.Copy(self._id, number, tuple(self._parts), {}))
        return None

    def close(self) -> None:
        """Nothing serves it here."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Nothing serves it here."""
        return True

    # For the session.

    def begin(self, by_tier: dict[str, int]) -> None:
        """Send what was asked for when the transfer began, with how it ends if that is known already."""
        self.is_promised = bool(by_tier)
        unsaid, self._unsaid = self._unsaid or [], None
        for each in unsaid:
            self._send(protocol.Copy(each.id, each.number, each.parts, by_tier))

    @property
    def num_copying(self) -> int:
        """How many copies the client was asked for and has not answered."""
        return len(self._dones)

    def answered(self, number: int, error: str) -> None:
        """Take the client's answer; one that nobody waits for is passed over."""
        if (done := self._dones.pop(number, None)) is not None:
            done(None if not error else RevokedError() if error == REVOKED else FarCopyError(error))

    def lose(self) -> None:
        """The client is gone, and touches no memory any more."""
        self._is_lost = True
        while self._dones:
            _, done = self._dones.popitem()
            done(ClientGoneError())

    def _say(self, copy: protocol.Copy) -> None:
        if self._unsaid is None:
            self._send(copy)
        else:
            self._unsaid.append(copy)

    def _ask(self, slots: Ids, positions: Ids, layers: slice | None) -> None:
        part = None if layers is None else (layers.start, layers.stop)
        self._parts.append(Part(self._pool, wire.as_bytes(slots), wire.as_bytes(positions), part))


Send = Callable[[wire.Message], None]
Transfer = tuple[Handle[Any], FarMemory]


class Account:
    """The bytes of slots that one client has: for loads and stores under way, and held for leases, pins and jobs."""

    def __init__(self, limits: HostSettings, pin_quota: int, pins: Pins) -> None:
        """Begin with none.

        Args:
            limits: What one client may have.
            pin_quota: Bytes that it may pin for each salt.
            pins: Those of all clients.
        """
        self.pins = Pins(pin_quota, pins, room_bytes=lambda: self.room_bytes)
        self._most = inf if limits.bytes_per_client is None else limits.bytes_per_client
        self._moving_bytes = self._held_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots that the client has."""
        return self._moving_bytes + self._held_bytes + self.pins.num_bytes

    @property
    def room_bytes(self) -> float:
        """How much more may be held."""
        return max(0, self._most - self.num_bytes)

    def may_move(self, num_bytes: int) -> bool:
        """Say whether a load or store may begin. One alone may: it passes through a few slots, whatever its size."""
        return not self._moving_bytes or num_bytes <= self.room_bytes

    def move(self, num_bytes: int) -> None:
        """Count a load or store; with less than 0, off."""
        self._moving_bytes += num_bytes

    def hold(self, num_bytes: int) -> None:
        """Count slots that are held; with less than 0, off."""
        self._held_bytes += num_bytes


class SessionTransfers:
    """The loads and stores of one client that are under way. For the event loop's thread."""

    def __init__(
        self,
        limits: HostSettings,
        account: Account,
        tasks: Tasks,
        serves: Callable[[bytes], bool],
        send: Send,
        *,
        is_read_only: bool,
    ) -> None:
        """Run transfers within ``limits``, and tell of them in ``tasks``. A client that only reads stores nothing.

        ``serves`` says of an epoch whether the client serves it; ``send`` sends to the client.
        """
        self._limits = limits
        self._account = account
        self._tasks = tasks
        self._serves = serves
        self._send = send
        self._is_read_only = is_read_only
        self._loads: dict[int, tuple[LoadHandle, FarMemory]] = {}
        self._stores: dict[int, tuple[StoreHandle, FarMemory]] = {}

    def __contains__(self, id_: int) -> bool:
        return id_ in self._loads or id_ in self._stores

    def statistics(self) -> dict[str, int]:
        """Count what is under way."""
        return {"loads": len(self._loads), "stores": len(self._stores), "copies": sum(map(_num_copying, self._all()))}

    @property
    def is_touching(self) -> bool:
        """Whether the client may be copying to or from slots."""
        return any(map(_num_copying, self._all()))

    def load(self, request: protocol.Load, seat: Seat) -> None:
        """Start a load, and tell of its end.

        Raises:
            TieredKVError: It cannot be.
        """
        check_seconds("deadline_s", request.deadline_s)
        order: Order = "back" if request.is_from_back else "front"
        check_kind(order, layerwise=request.layerwise, gaps=request.gaps)
        keys = request.keys.block_keys()
        chain, batch = seat.batch(keys)
        far = FarMemory(request.id, len(keys), chain, self._send)
        if len(self._loads) >= self._limits.loads_per_client or not self._account.may_move(far.num_bytes):
            self.refuse(request, seat, Reason.TOO_MANY_LOADS)
            return
        handle = start_load(
            LoadRequest(
                chain=chain, batch=batch, binding=far, pages=np.arange(len(keys))[:, np.newaxis],
                lane=Lane(far, None), deadline=seat.deadline(request.deadline_s),
                priority=Priority(request.priority), is_current=partial(self._is_current, request, far),
                layerwise=request.layerwise, gaps=request.gaps, order=order,
            )
        )  # fmt: skip
        self._loads[request.id] = handle, far
        self._account.move(far.num_bytes)
        is_resident = handle.is_admitted and not handle.done  # it needs no task
        far.begin({chain.host.name: len(keys)} if is_resident else {})
        if request.layerwise:
            self._tasks.spawn(self._say_admitted(request.id, handle), "admit")
        handle.when_done(partial(self._loaded, request, len(keys)))

    def store(self, request: protocol.Store, seat: Seat) -> None:
        """Start a store, and tell of its end and of what becomes of the blocks.

        Raises:
            TieredKVError: It cannot be.
        """
        keys = request.keys.block_keys()
        chain, batch = seat.batch(keys)
        far = FarMemory(request.id, len(keys), chain, self._send)
        if self._is_read_only:
            self.refuse(request, seat, Reason.READ_ONLY)
            return
        if len(self._stores) >= self._limits.stores_per_client or not self._account.may_move(far.num_bytes):
            self.refuse(request, seat, Reason.TOO_MANY_STORES)
            return
        positions = np.arange(len(keys))[:, np.newaxis]
        handle = start_store(
            StoreRequest(
                chain=chain,
                batch=batch,
                binding=far,
                pages=positions,
                lane=Lane(far, None),
                layerwise=request.layerwise,
                hint=request.hint,
            )
        )
        self._stores[request.id] = handle, far
        self._account.move(far.num_bytes)
        far.begin({})
        handle.when_done(partial(self._stored, request.id, len(keys)))

    def refuse(self, request: protocol.Load | protocol.Store, seat: Seat, why: Reason) -> None:
        """Tell the client that a load or store does not begin, and count it."""
        chain, batch = seat.batch(request.keys.block_keys())
        num_keys = len(batch)
        if isinstance(request, protocol.Load):
            chain.fates.count_load(batch, 0, why)
            self._send(_not_loaded(request, TierFault("host", why, num_keys)))
        else:
            chain.fates.count_store(num_keys, stored=0, present=0, dropped={why: num_keys})
            self._say_not_stored(request.id, num_keys, why)

    def steer(self, request: protocol.Steering) -> None:
        """Pass on what is said of a transfer under way; of one that has ended it is passed over."""
        if isinstance(request, protocol.StopBefore) and (loading := self._loads.get(request.id)) is not None:
            loading[0].stop_before(request.block)
        elif isinstance(request, protocol.StoreLayer) and (storing := self._stores.get(request.id)) is not None:
            storing[0].store_layer(request.layer)

    def copied(self, request: protocol.Copied) -> None:
        """Take the client's answer to a copy that it was asked for."""
        transfer = self._loads.get(request.id) or self._stores.get(request.id)
        if transfer is not None:
            transfer[1].answered(request.number, request.error)

    def cancel(self, id_: int) -> None:
        """Stop a transfer: its client does not wait for it any more."""
        transfer: Transfer | None = self._loads.get(id_) or self._stores.get(id_)
        if transfer is not None:
            transfer[0].cancel()

    def overtake(self) -> None:
        """The client serves other weights from now on."""
        for far in self._known_to_have_ended():
            far.came_before = True

    def end(self) -> None:
        """The client is gone: let go of everything. Nothing of its touches a slot any more."""
        for handle, far in self._all():
            far.lose()
            handle.cancel()

    @property
    def is_behind(self) -> bool:
        """Whether the client knows of a load's end that is not counted here yet: that takes a few turns more."""
        return bool(self._known_to_have_ended())

    def _known_to_have_ended(self) -> list[FarMemory]:
        return [far for _, far in self._loads.values() if far.is_promised and not far.num_copying]

    def _is_current(self, request: protocol.Load, far: FarMemory) -> bool:
        """Say whether what a load brings is of use to the client, as it says there."""
        return far.came_before or self._serves(request.keys.epoch)

    async def _say_admitted(self, id_: int, handle: LoadHandle) -> None:
        self._send(protocol.Admitted(id_, await handle.admitted()))

    def _loaded(self, request: protocol.Load, num_keys: int, ended: "asyncio.Future[LoadResult]") -> None:
        _, far = self._loads.pop(request.id)
        self._account.move(-far.num_bytes)
        is_known = far.is_promised and not request.is_from_back  # of that the client may have claimed some
        if ended.cancelled() or ended.exception() is not None:
            why = "" if ended.cancelled() else repr(ended.exception())
            self._send(_not_loaded(request, TierFault("host", Reason.FAILED, 0, why)))
            return
        result = ended.result()
        if is_known and result.num_blocks == num_keys:
            return  # as was promised: it knows
        mask = result.mask.tobytes() if request.gaps else None
        said = dict(result.by_tier), result.num_bytes, result.seconds, result.faults, result.missed_because, mask
        self._send(protocol.Loaded(request.id, result.num_blocks, *said))

    def _stored(self, id_: int, num_keys: int, ended: "asyncio.Future[StoreResult]") -> None:
        _, far = self._stores.pop(id_)
        self._account.move(-far.num_bytes)
        if ended.cancelled() or ended.exception() is not None:
            self._say_not_stored(id_, num_keys, Reason.FAILED)
            return
        result = ended.result()
        counts = result.num_stored, result.num_present, dict(result.drop_reasons), result.num_bytes
        self._send(protocol.Stored(id_, *counts, result.seconds))
        self._tasks.spawn(self._say_settled(id_, result), "settle")

    def _say_not_stored(self, id_: int, num_keys: int, why: Reason) -> None:
        self._send(protocol.Stored(id_, 0, 0, {why: num_keys} if num_keys else {}, 0, 0.0))
        self._send(protocol.Settled(id_, ()))

    async def _say_settled(self, id_: int, result: StoreResult) -> None:
        self._send(protocol.Settled(id_, await result.settled()))

    def _all(self) -> list[Transfer]:
        return [*self._loads.values(), *self._stores.values()]


def _num_copying(transfer: Transfer) -> int:
    return transfer[1].num_copying


def _not_loaded(request: protocol.Load, fault: TierFault) -> protocol.Loaded:
    return protocol.Loaded(request.id, 0, {}, 0, 0.0, (fault,), fault.reason, None)
