"""What may keep a cache from working, or make it slow: of the machine, and of each tier that is configured."""

import asyncio
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import torch
import typer
from pydantic import ByteSize
from rich.markup import escape

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.cli.common import AsJSON, ConfigFile, one_line_errors, print_json, print_table, settings_of
from tiered_kv.media.backend import Backend, SlotBackend
from tiered_kv.memory import host
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import BookedTierSettings, StorageTierSettings, paths_of, real_path
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.values.events import Event, TierFailed, TierStalled
from tiered_kv.values.keys import ModelIdentity, hash_blocks
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.specs import GPULoadStoreSpec

_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs")
_REACH: Final = "is it reachable from here, and are credentials and rights right?"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: ``"ok"``; ``"slow"``: a cache works, but not as well as it could; ``"bad"``: it does not.
        what: What it is about.
        found: What is there.
        advice: What to change; empty if nothing.
    """

    state: Literal["ok", "slow", "bad"]
    what: str
    found: str
    advice: str = ""


def doctor_command(config: ConfigFile = None, *, as_json: AsJSON = False) -> None:
    """See whether this machine, and the tiers that are configured, will do; say what to change.

    Of shared tiers one small block is stored, loaded and deleted. Exits 1 if a cache would not work.
    """
    with one_line_errors():
        found = asyncio.run(examine(settings_of(config)))
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        marks = {"ok": "[green]ok[/]", "slow": "[yellow]slow[/]", "bad": "[red]bad[/]"}
        rows = [(marks[each.state], escape(each.what), escape(each.found), escape(each.advice)) for each in found]
        print_table(("", "what", "found", "what to change"), rows)
    raise typer.Exit(int(any(each.state == "bad" for each in found)))


async def examine(settings: TieredKVSettings) -> list[Finding]:
    """Look at everything, and go on whatever is found."""
    found = [*_machine(settings)]
    if "host" in settings.model_fields_set:
        found.append(_of_server(settings))
    for tier in settings.tiers:
        name = tier_name(tier)
        try:
            if isinstance(tier, StorageTierSettings):
                resolve(tier.medium)
            if isinstance(tier, BookedTierSettings):
                found += _of_booked(name, tier, is_servers="host" in settings.model_fields_set)
            elif isinstance(tier, StorageTierSettings):
                found.append(await _round_trip(name, tier))
        except ConfigurationError as error:
            found.append(Finding("bad", name, *_split(str(error))))
        except (TieredKVError, OSError) as error:
            found.append(Finding("bad", name, " ".join(str(error).split()), _REACH))
    return found


def _machine(settings: TieredKVSettings) -> Iterator[Finding]:
    yield Finding("ok", "Python, torch", f"{platform.python_version()}, {torch.__version__}")
    has_gpu = torch.cuda.is_available()
    yield Finding("ok", "GPU", torch.cuda.get_device_name() if has_gpu else "none: blocks are copied by the CPU")
    wanted = int(settings.limits.bounce) + int(settings.limits.swap_space)
    wanted += sum(
        max(int(tier.capacity), int(tier.max_capacity or 0)) for tier in settings.tiers if isinstance(tier, CPUTier)
    )
    try:
        host.check_host_memory(wanted)
        yield Finding("ok", "host memory", f"{size_in_words(wanted)} wanted, and available")
    except ConfigurationError as error:
        yield Finding("bad", "host memory", *_split(str(error)))
    if doubt := host.doubt_of_page_locking(wanted):
        found, advice = _split(doubt)
        yield Finding("slow" if has_gpu else "ok", "locked memory", found, advice if has_gpu else "")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    yield Finding("ok", "NUMA nodes", str(nodes))


def _of_server(settings: TieredKVSettings) -> Finding:
    """See whether a server answers where ``[host]`` says; if none does, listen there for a moment."""
    what, socket = f"server at {settings.host.socket}", settings.host.socket
    try:
        from tiered_kv.host import handshake, reception, shares  # noqa: PLC0415 - needs msgspec, others do not

        with suppress(BackendUnavailableError, ConfigurationError):
            return Finding("ok", what, f"answers, with {len(handshake.health_at(socket)['clients'])} clients")
        for tier in shares.tiers_in(settings):
            tier.check_place()
        listener, lock_fd = reception.listen(settings.host)
        try:
            listener.close()
            socket.unlink(missing_ok=True)  # before another server may have the lock
        finally:
            os.close(lock_fd)
    except ConfigurationError as error:
        return Finding("bad", what, *_split(str(error)))
    return Finding("ok", what, "none yet; it can listen there")


def _of_booked(name: str, tier: BookedTierSettings, *, is_servers: bool) -> Iterator[Finding]:
    if isinstance(tier, GPUTier) and not torch.cuda.is_available():
        yield Finding("bad", name, "there is no GPU", "leave the gpu tier out")
    paths, capacity = paths_of(tier), getattr(tier, "capacity", None)
    if not isinstance(capacity, int):
        return
    for path in paths:
        said = name if len(paths) == 1 else f"{name}: {path}"
        medium = None if is_servers else resolve(tier.medium)  # a server has a directory for each model in it
        yield from _of_directory(said, path, capacity, getattr(tier, "direct", "auto"), medium)
    if (encryption := getattr(tier, "encryption", None)) is not None:
        encryption.make_seal()


def _of_directory(
    name: str, path: Path, capacity: int, direct: str, medium: type[Backend | SlotBackend] | None
) -> Iterator[Finding]:
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.exists():
        advice = "mount what it leads to, or choose another path"
        yield Finding("bad", name, f"{there} is a link that leads nowhere", advice)
        return
    if refusal := _refusal(path, there) or _refusal_of(medium, path):
        yield Finding("bad", name, *refusal)
        return
    filesystem = _filesystem(there)
    of_ours = sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file()) if path.exists() else 0
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize + of_ours
    space = f"{filesystem}, {size_in_words(free)} free for {size_in_words(capacity)}"
    if free < capacity:
        yield Finding("bad", name, space, "lower capacity, or choose a larger filesystem")
        return
    yield Finding("ok", name, space)
    if filesystem in _IN_MEMORY:
        advice = "choose a directory on a disk, or give the memory to the cpu tier"
        yield Finding("slow", f"{name}: medium", f"{filesystem} is memory: blocks are kept there twice", advice)
    if direct == "never":
        yield Finding("ok", f"{name}: direct I/O", "not wanted: direct='never'")
    elif _has_direct_io(there):
        yield Finding("ok", f"{name}: direct I/O", "works")
    elif direct == "always":
        yield Finding("bad", f"{name}: direct I/O", f"not on {filesystem}", "set direct='auto', or choose another path")
    else:
        advice = "choose ext4 or xfs on a local disk: the page cache costs memory and speed"
        yield Finding("slow", f"{name}: direct I/O", f"not on {filesystem}", advice)


def _refusal(path: Path, there: Path) -> tuple[str, str] | None:
    """Say why a tier would not take this directory, and what to do; ``there`` is what there is of its path."""
    status, others = there.stat(), stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode):
        return f"{there} is no directory", "choose another path"
    owner = f"chown {there} to this user, or choose another path"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to", owner
    if there != path:
        return None
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}", owner
    if status.st_mode & others:
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it", f"chmod go-w {path}"
    return None


def _refusal_of(medium: type[Backend | SlotBackend] | None, path: Path) -> tuple[str, str] | None:
    """Say what a medium would refuse a directory for, as another tier's is there, and what to do."""
    try:
        if medium is not None:
            medium.check_place(path)
    except ConfigurationError as error:
        return _split(str(error))
    return None


async def _round_trip(name: str, tier: StorageTierSettings) -> Finding:
    """Store, load and delete one block, by a cache of this tier alone."""
    seen: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, TierFailed | TierStalled):
            seen.append(f"{event.doing}: {getattr(event, 'error', 'late')}")

    caches = [torch.zeros(1, 2, 16, 1, 64)]
    keys = hash_blocks(list(os.urandom(16)), block_size=16)
    chain = [CPUTier(capacity=ByteSize(0)), tier]
    layout, model = KVLayout.from_tensors(caches, block_size=16), ModelIdentity("doctor", weights="none")
    async with TieredKV(chain, model=model, layout=layout, device="cpu", emit=emit) as kv:
        kv.register_kv_caches(caches)
        if tier.read_only:
            await kv.lookup(keys)
            return _told(name, seen, "answers; read only")
        stored = await (await kv.store(keys, GPULoadStoreSpec([0]))).settled()
        loaded = await kv.load(keys, GPULoadStoreSpec([0]))
        await kv.evict(keys)
    if not seen and not (stored[-1].written and loaded.num_blocks):
        seen = ["a block that was stored did not come back"]
    return _told(name, seen, f"a block was stored, loaded in {loaded.seconds * 1e3:.1f} ms, and deleted")


def _told(name: str, seen: list[str], well: str) -> Finding:
    if not seen:
        return Finding("ok", name, well)
    return Finding("bad", name, seen[0], _REACH)


def _filesystem(path: Path) -> str:
    best, kind = "", "unknown filesystem"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, named, *_ = line.split()
            if real_path(path).is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, named
    return kind


def _has_direct_io(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def _split(text: str) -> tuple[str, str]:
    """Split a message of ours into what there is and what to do."""
    line = " ".join(text.split())
    at = max(line.rfind(": "), line.rfind("; "))
    return (line[:at], line[at + 2 :]) if at >= 0 else (line, "")
