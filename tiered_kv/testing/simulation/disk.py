"""Disks under the real calls about files: slow, full, failing, and without what was not synced after a loss of power.

A `SimulatedDisk` is what outlives processes: folders, files, what of them is on the medium for good, and a journal of
names as ext4 keeps one. `SimulatedFiles` are the calls of the kernel, by any process, over all disks. Each call takes
its time, others go on meanwhile, and a process that is killed leaves half of what it wrote.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from typing_extensions import override

from tiered_kv.system import Files, FolderEntry
from tiered_kv.testing.simulation.known import check_lent
from tiered_kv.testing.simulation.tape import Tape
from tiered_kv.testing.simulation.threads import ProcessEnded, SimulatedProcess, Turns

_SECTOR: Final = 512
"""What a medium writes whole or not at all."""
_BLOCK: Final = 4096
_MOST_UNSYNCED: Final = 2048
"""Writes of one file that the kernel keeps to itself; older ones have got to the medium."""
_FIRST_FD: Final = 1 << 20
RECORD_BYTES: Final = 8192
"""Of any block in a slab of the NVMe tier: a header and a payload."""
_ENTRY_BYTES: Final = 64
"""Of one slot in the ledger beside it."""
_NAME_IN_ENTRY: Final = slice(8, 40)
_NO_NAME: Final = b"TKVEMPTY" * 4
"""What stands there where nothing is."""


@dataclass
class DiskFaults:
    """How often something goes wrong, for each call; and how slow the disk is.

    Attributes:
        error: The call raises EIO.
        short: Of a read or write, only a part is moved.
        stall: It takes seconds.
        hang: It does not return before something else is wrong with the disk, or nothing.
        takes_no_note: What a directory is to say of itself cannot be written: the call raises EIO.
        once: The how many'th call from now on raises EIO; 0 is none.
        num_once: How many do so from that one on; none after them.
        latency_s: What each call takes.
        extra_s: What reads, writes and syncs of a file take besides, by its name.
        bytes_per_s: How fast bytes are moved.
    """

    error: float = 0.0
    short: float = 0.0
    stall: float = 0.0
    hang: float = 0.0
    takes_no_note: bool = False
    once: int = 0
    num_once: int = 1
    latency_s: float = 1e-4
    extra_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float = 1e9

    @property
    def are_any(self) -> bool:
        """Whether any call may fail or be late."""
        return any((self.error, self.short, self.stall, self.hang, self.once))


@dataclass(eq=False)
class _Node:
    """A file, or a folder where ``entries`` is not None.

    Attributes:
        data: What reads return.
        durable: What is on the medium for good.
        unsynced: What happened since: ``(offset, bytes)``, or ``(length, None)`` for another length.
        num_names: How many folders have it.
        allocated: Bytes that have a place on the disk.
        locked_by: The open file that holds its flock.
    """

    number: int
    entries: "dict[str, _Node] | None" = None
    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    num_names: int = 1
    allocated: int = 0
    used_ns: int = 0
    locked_by: "_Open | None" = None

    def change(self, offset: int, data: bytes | None) -> None:
        """Write, or have another length."""
        _apply(self.data, offset, data)
        self.unsynced.append((offset, data))
        if len(self.unsynced) > _MOST_UNSYNCED:
            _apply(self.durable, *self.unsynced.pop(0))

    def sync(self) -> None:
        """Have everything on the medium for good."""
        for offset, data in self.unsynced:
            _apply(self.durable, offset, data)
        self.unsynced.clear()


@dataclass(eq=False)
class _Open:
    """An open file: what it is called, in which folder."""

    disk: "SimulatedDisk"
    node: _Node
    process: SimulatedProcess
    era: int
    name: str = ""
    folder: _Node | None = None


class SimulatedDisk:
    """One filesystem, which outlives processes and losses of power.

    Attributes:
        path: Where it is mounted.
        faults: What may go wrong.
        capacity_bytes: What fits.
        gone: An errno that every call raises while the disk is away; 0 while it is there.
        era: How often another disk has come in its place: what was open then is of no use.
        stalls_until: When the last of the calls ends that stall or have.
        unentered: Slots, by their folder's number, that were begun to be written and are not in their ledger since; and
            the name of the block before where the ledger has it, which a checkpoint may write once more.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, tape: Tape, turns: Turns, *, names_come_along: bool = True
    ) -> None:
        """Make one, empty.

        Args:
            path: Where it is mounted.
            capacity_bytes: What fits.
            tape: Chooses.
            turns: Who runs.
            names_come_along: Whether a file that is synced brings all names with it, as ext4's journal does; else a
                folder's names are lost where the folder is not synced, which is all that POSIX promises.
        """
        self.path = path
        self.faults = DiskFaults()
        self.capacity_bytes = capacity_bytes
        self.gone = self.era = 0
        self.stalls_until = 0.0
        self._memory: _Node | None = None
        self._tape = tape
        self._turns = turns
        self._names_come_along = names_come_along
        self._num_nodes = 1
        self.unentered: dict[tuple[int, int], bytes] = {}
        self.half_written: set[tuple[int, int]] = set()
        """Slots to which a write has begun and not ended: a checkpoint may enter them before it has."""
        self.unwritten = set[tuple[int, int]]()
        """Slots that a checkpoint has entered though the write to them has yet to begin."""
        self.entered: dict[tuple[int, int], bytes] = {}
        """Under which name the ledger has the record of a slot."""
        self.root = _Node(1, {})
        self._names: list[tuple[_Node, str, _Node | None, _Node | None]] = []
        """Of names that changed and may be lost: whose folder, which, what it was and is."""

    @property
    def used_bytes(self) -> int:
        """What files have taken."""
        return sum(node.allocated for node in self._all())

    def new_node(self, *, is_folder: bool) -> _Node:
        """Make a file or folder, which no folder has yet."""
        self._num_nodes += 1
        return _Node(self._num_nodes, {} if is_folder else None, used_ns=self._now_ns())

    def name(self, folder: _Node, name: str, node: _Node | None) -> None:
        """Have a name in a folder mean something else, or nothing."""
        assert folder.entries is not None
        before = folder.entries.get(name)
        self._names.append((folder, name, before, node))
        _set(folder, name, node)
        for each, change in ((before, -1), (node, 1)):
            if each is not None:
                each.num_names += change
        folder.used_ns = self._now_ns()

    def sync(self, node: _Node) -> None:
        """Have a file on the medium for good, or the names in a folder; and with them every name, as a journal does."""
        node.sync()
        self._names = [] if self._names_come_along else [each for each in self._names if each[0] is not node]

    def lose_power(self) -> None:
        """Keep of what was not synced any part: names in their order, sectors of files in none."""
        tape, num_kept = self._tape, self._tape.draw("faults", len(self._names) + 1)
        for folder, name, before, _ in reversed(self._names[num_kept:]):
            _set(folder, name, before)
        self._names.clear()
        for node in self._all():
            for offset, data in node.unsynced:
                if not tape.chance("faults", 0.5):
                    continue
                if data is not None and len(data) > _SECTOR and tape.chance("faults", 0.3):  # torn
                    start = _SECTOR * tape.draw("faults", len(data) // _SECTOR)
                    stop = start + _SECTOR * (1 + tape.draw("faults", len(data) // _SECTOR))
                    offset, data = offset + start, data[start:stop]  # noqa: PLW2901 - the part that is kept
                _apply(node.durable, offset, data)
            node.unsynced.clear()
            node.data = bytearray(node.durable)
            node.allocated = min(node.allocated, _whole(len(node.data)))
            node.locked_by = None

    def rot(self, *, in_largest: bool = False, name: str = "") -> None:
        """Change one bit somewhere, or somewhere in the largest file, or in one of those of a name."""
        if files := [node for node in self._all(name) if len(node.data)]:
            node = max(files, key=lambda each: len(each.data)) if in_largest else self._tape.pick("faults", files)
            _flip(node, self._tape.draw("faults", len(node.data)), 1 << self._tape.draw("faults", 8))

    def lose(self, name: str, num_kept: int | None) -> None:
        """Have files of a name be cut, or be zeros."""
        for node in self._all(name):
            node.sync()
            for data in (node.data, node.durable):
                data[:] = bytes(len(data)) if num_kept is None else data[:num_kept]

    def flip(self, path: Path, at: int) -> None:
        """Change a bit of the byte at a place of a file that is there."""
        node = _walk(self.root, path.relative_to(self.path).parts)
        assert node is not None
        _flip(node, at, 1)

    def remember(self) -> None:
        """Make a copy of all that is there."""
        self._memory = _copy(self.root)

    def come_back_old(self) -> bool:
        """Have what was remembered in place of what is there, in files that nobody has open; say if there is any."""
        if self._memory is None:
            return False
        self.root, self.era = _copy(self._memory), self.era + 1
        self._names.clear()
        self._turns.tell(f"{self.path} is as it once was")
        return True

    def spend(self, num_bytes: int = 0, name: str = "") -> None:
        """Let a call, perhaps about a file of some name, take its time, and fail if it is to.

        Raises:
            OSError: EIO, or what says that the disk is away.
        """
        faults, turns = self.faults, self._turns
        seconds = faults.latency_s + num_bytes / faults.bytes_per_s + faults.extra_s.get(name, 0.0)
        if self._tape.fault(faults.stall):
            seconds += self._tape.pick("faults", (0.3, 1.2, 4.0, 20.0))
            self.stalls_until = max(self.stalls_until, turns.now + seconds)
            turns.tell(f"{self.path} stalls for {seconds:.1f} s")
        if self._tape.fault(faults.hang):
            turns.tell(f"{self.path} hangs")
            turns.wait(lambda: self.faults is not faults, what=f"{self.path}, which hangs")
        turns.sleep(seconds)
        if self.gone:
            raise OSError(self.gone, os.strerror(self.gone))
        if faults.once:
            faults.once -= 1
            if is_wrong := not faults.once:
                faults.num_once -= 1
                faults.once = int(faults.num_once > 0)  # the next one, too
            self._tape.num_faults += is_wrong
        else:
            is_wrong = self._tape.fault(faults.error)
        if is_wrong:
            turns.tell(f"{self.path} fails")
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def part(self, num_bytes: int) -> int:
        """Say how much of a read or write is moved: all, or less, but not nothing: that is how a file ends."""
        if num_bytes > 1 and self._tape.fault(self.faults.short):
            unit = self._tape.pick("faults", (_BLOCK, _SECTOR, 1))
            return min(num_bytes, unit * (1 + self._tape.draw("faults", max(1, num_bytes // unit))))
        return num_bytes

    def check_room(self, node: _Node, end: int) -> None:
        """Give a file its place up to ``end``.

        Raises:
            OSError: ENOSPC.
        """
        wanted = _whole(end)
        if wanted > node.allocated:
            if self.used_bytes + wanted - node.allocated > self.capacity_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            node.allocated = wanted

    def _now_ns(self) -> int:
        return int(self._turns.now * 1e9)

    def _all(self, name: str = "") -> list[_Node]:
        found, todo = [], [("", self.root)]
        while todo:
            called, node = todo.pop()
            if name in ("", called):
                found.append(node)
            todo += (node.entries or {}).items()
        return found


class SimulatedFiles(Files):
    """The calls of the kernel, by whichever process's thread makes them."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._disks: list[SimulatedDisk] = []
        self._open: dict[int, _Open] = {}
        self._next_fd = _FIRST_FD
        self.pids: dict[int, SimulatedProcess] = {}
        """Processes that can be watched by a descriptor."""
        self._pidfds: dict[int, SimulatedProcess] = {}
        self.on_note: Callable[[], object] = int
        """What happens when a directory has noted what it says of itself."""

    def mount(self, disk: SimulatedDisk) -> None:
        """Have a disk at its path."""
        self._disks.append(disk)

    def close_all_of(self, process: SimulatedProcess) -> None:
        """Close what a process that has ended had open, which lets go of its locks."""
        for fd in [fd for fd, each in self._open.items() if each.process is process]:
            self._close(fd)

    # Processes by descriptor.

    def pidfd_open(self, pid: int) -> int:
        """See `tiered_kv.system.System.pidfd_open`."""
        process = self.pids.get(pid)
        if process is None or process.is_dead:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        fd = self._number()
        self._pidfds[fd] = process
        return fd

    def has_ended(self, pidfd: int) -> bool:
        """See `tiered_kv.system.System.has_ended`."""
        return pidfd in self._pidfds and self._pidfds[pidfd].is_dead

    def is_of_a_process(self, fd: int) -> bool:
        """See `tiered_kv.system.System.is_of_a_process`."""
        return fd in self._pidfds

    @override
    def dup(self, fd: int) -> int:
        new = self._number()
        if fd in self._pidfds:
            self._pidfds[new] = self._pidfds[fd]
        else:
            self._open[new] = self._of(fd)
        return new

    # Paths and folders.

    def lines(self, path: Path) -> list[str]:
        """Say nothing of the machine."""
        return []

    def is_on_system_disk(self, fd: int) -> bool:
        """Every disk is mounted."""
        return False

    def geteuid(self) -> int:
        """Return the number of the only user."""
        return 0

    def exists(self, path: Path) -> bool:
        """Whether there is anything at a path."""
        disk, parts = self._disk(path)
        return _walk(disk.root, parts) is not None

    @override
    def make_folders(self, path: Path, mode: int) -> None:
        disk, parts = self._disk(path)
        node = disk.root
        for part in parts:
            if node.entries is None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if part not in node.entries:
                disk.name(node, part, disk.new_node(is_folder=True))
            node = node.entries[part]

    @override
    def mkdir(self, name: str, mode: int, *, dir_fd: int) -> None:
        disk, folder = self._folder(dir_fd)
        if name in (folder.entries or {}):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        disk.name(folder, name, disk.new_node(is_folder=True))

    @override
    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            disk, parts = self._disk(Path(path))
            folder = disk.root
        else:
            disk, folder = self._folder(dir_fd)
            parts = [] if str(path) == "." else [str(path)]
        node, parent = _walk(folder, parts), _walk(folder, parts[:-1])
        if node is None:
            if not flags & os.O_CREAT or parent is None or parent.entries is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = disk.new_node(is_folder=False)
            node.num_names = 0
            disk.name(parent, parts[-1], node)
        if flags & os.O_TRUNC:
            node.change(0, None)
        fd = self._number()
        self._open[fd] = _Open(disk, node, self._turns.current.process, disk.era, parts[-1] if parts else "", parent)
        return fd

    @override
    def close(self, fd: int) -> None:
        if fd in self._pidfds:
            del self._pidfds[fd]
            return
        if self._turns.current.process.is_dead:
            raise ProcessEnded
        if fd not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._close(fd)

    @override
    def fstat(self, fd: int) -> os.stat_result:
        each = self._at(fd)
        kind = stat.S_IFREG | 0o600 if each.node.entries is None else stat.S_IFDIR | 0o700
        return os.stat_result((kind, each.node.number, 1, each.node.num_names, 0, 0, len(each.node.data), 0, 0, 0))

    @override
    def entries(self, fd: int) -> list[FolderEntry]:
        _, folder = self._folder(fd)
        found = (folder.entries or {}).items()
        return [FolderEntry(name, node.entries is not None, node.used_ns) for name, node in found]

    @override
    def disk_usage(self, name: str, *, dir_fd: int) -> int:
        _, folder = self._folder(dir_fd)
        node = (folder.entries or {}).get(name)
        return 0 if node is None else sum(each.allocated for each in (node, *(node.entries or {}).values()))

    @override
    def utime(self, fd: int) -> None:
        each = self._at(fd)
        each.node.used_ns = int(self._turns.now * 1e9)

    @override
    def unlink(self, name: str, *, dir_fd: int) -> None:
        disk, folder = self._folder(dir_fd)
        _named(folder, name)
        disk.name(folder, name, None)

    @override
    def rename(self, name: str, other: str, *, dir_fd: int) -> None:
        disk, folder = self._folder(dir_fd)
        disk.name(folder, other, _named(folder, name))
        disk.name(folder, name, None)

    @override
    def remove_tree(self, name: str, *, dir_fd: int) -> None:
        disk, folder = self._folder(dir_fd)
        node = (folder.entries or {}).get(name)
        for each in list(node.entries or {}) if node is not None else ():
            disk.spend()  # killed here, a part is left
            disk.name(node, each, None)  # type: ignore[arg-type]  # not None, as was just seen
        disk.name(folder, name, None)

    def flock(self, fd: int, operation: int) -> None:
        """See `fcntl.flock`; only without waiting."""
        each = self._at(fd)
        if each.node.locked_by not in (None, each):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        each.node.locked_by = each if operation & fcntl.LOCK_EX else None

    @override
    def free_bytes(self, fd: int) -> int:
        disk = self._at(fd).disk
        return disk.capacity_bytes - disk.used_bytes

    # Files.

    @override
    def ftruncate(self, fd: int, length: int) -> None:
        each = self._at(fd)
        if length != len(each.node.data):
            each.node.change(length, None)
            each.node.allocated = min(each.node.allocated, _whole(length))

    @override
    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        each = self._at(fd)
        each.disk.check_room(each.node, offset + length)
        if offset + length > len(each.node.data):
            each.node.change(offset + length, None)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> bool:
        """See `Files.fallocate`: the range reads as zeros, and keeps its place."""
        each = self._of(fd)
        try:
            each.disk.spend()
        except OSError:
            return False
        end = min(offset + length, len(each.node.data))
        if end > offset:
            each.node.change(offset, bytes(end - offset))
        return True

    def forget_cached(self, fd: int) -> None:
        """Nothing lies about the medium here but the medium itself."""

    @override
    def fsync(self, fd: int) -> None:
        each = self._at(fd)
        each.disk.sync(each.node)
        if each.name == "member":
            self.on_note()

    @override
    def pread(self, fd: int, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        return bytes(buffer[: self.preadv(fd, [memoryview(buffer)], offset)])

    @override
    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return self.pwritev(fd, [memoryview(data)], offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `os.preadv`."""
        return self._move(self._of(fd), buffers, offset, is_read=True)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `os.pwritev`. Who is killed meanwhile leaves a part."""
        each, wanted = self._of(fd), sum(map(len, buffers))
        if each.name != "slab":
            return self._write(each, buffers, offset)
        disk, slots = each.disk, self._slots(each, offset, wanted, RECORD_BYTES)
        for slot in slots:
            name = self._entered(each, slot[1])
            disk.unentered.setdefault(slot, name if disk.entered.get(slot) == name else b"")
        disk.half_written |= slots
        disk.unwritten -= slots
        try:
            moved = self._write(each, buffers, offset)
        except OSError:  # and not where the process has ended meanwhile
            disk.half_written -= slots
            raise
        disk.half_written -= slots
        return moved

    def _move(self, each: _Open, buffers: Sequence[memoryview], offset: int, *, is_read: bool) -> int:
        """Move the bytes of one buffer after another; others may run between them."""
        disk, node, wanted = each.disk, each.node, sum(map(len, buffers))
        lent = list(map(bytes, buffers))
        disk.spend(wanted, each.name)
        if disk.faults.takes_no_note and each.name == "member" and not is_read:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        check_lent(lent, list(map(bytes, buffers)), "read" if is_read else "write", self._turns.found)
        left = disk.part(max(0, min(wanted, len(node.data) - offset)) if is_read else wanted)
        moved = 0
        for buffer in buffers:
            n = min(len(buffer), left)
            if not n:
                break
            if is_read:
                buffer[:n] = node.data[offset : offset + n]
            else:
                disk.check_room(node, offset + n)
                node.change(offset, bytes(buffer[:n]))
            offset, left, moved = offset + n, left - n, moved + n
            self._turns.pause(0.1)
        return moved

    def _write(self, each: _Open, buffers: Sequence[memoryview], offset: int) -> int:
        moved = self._move(each, buffers, offset, is_read=False)
        if each.name == "ledger":
            for slot in self._slots(each, offset, moved, _ENTRY_BYTES):
                name, disk = self._entered(each, slot[1]), each.disk
                disk.unwritten.discard(slot)
                if slot in disk.half_written:
                    continue
                if disk.unentered.get(slot, name) != name:
                    del disk.unentered[slot]
                    disk.entered[slot] = name
                elif name.strip(b"\0") and name not in (_NO_NAME, disk.entered.get(slot, disk.unentered.get(slot))):
                    disk.unwritten.add(slot)
        return moved

    @staticmethod
    def _slots(each: _Open, offset: int, num_bytes: int, slot_bytes: int) -> set[tuple[int, int]]:
        """Return the slots that a part of a file is of, as `SimulatedDisk.unentered` names them."""
        assert each.folder is not None
        slots = range(offset // slot_bytes, -(-(offset + num_bytes) // slot_bytes))
        return {(each.folder.number, slot) for slot in slots}

    @staticmethod
    def _entered(each: _Open, slot: int) -> bytes:
        """Return the name that the ledger of a file's folder has for a slot."""
        assert each.folder is not None
        ledger = (each.folder.entries or {}).get("ledger")
        at = slot * _ENTRY_BYTES
        return b"" if ledger is None else bytes(ledger.data[at + _NAME_IN_ENTRY.start : at + _NAME_IN_ENTRY.stop])

    def _number(self) -> int:
        self._next_fd += 1
        return self._next_fd

    def _of(self, fd: int) -> _Open:
        if self._turns.current.process.is_dead:
            raise ProcessEnded
        each = self._open.get(fd)
        if each is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if each.era != each.disk.era:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return each

    def _at(self, fd: int) -> _Open:
        """Let a call about an open file take its time, and fail if it is to; return that file."""
        each = self._of(fd)
        each.disk.spend(name=each.name)
        return each

    def _close(self, fd: int) -> None:
        each = self._open.pop(fd)
        if each.node.locked_by is each and each not in self._open.values():
            each.node.locked_by = None

    def _folder(self, fd: int) -> tuple[SimulatedDisk, _Node]:
        each = self._at(fd)
        if each.node.entries is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return each.disk, each.node

    def _disk(self, path: Path) -> tuple[SimulatedDisk, list[str]]:
        for disk in self._disks:
            if path.is_relative_to(disk.path):
                disk.spend()
                return disk, list(path.relative_to(disk.path).parts)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _walk(node: _Node, parts: Sequence[str]) -> _Node | None:
    for part in parts:
        found = (node.entries or {}).get(part)
        if found is None:
            return None
        node = found
    return node


def _apply(data: bytearray, offset: int, change: bytes | None) -> None:
    if change is None:
        if offset < len(data):
            del data[offset:]
        else:
            data.extend(bytes(offset - len(data)))
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(change)] = change


def _flip(node: _Node, at: int, bit: int) -> None:
    changed = bytes([node.data[at] ^ bit])
    _apply(node.data, at, changed)
    _apply(node.durable, at, changed)


def _copy(node: _Node) -> _Node:
    """Copy a file, or a folder with all that is in it, as it is for whoever reads it: nothing of that is lost."""
    entries = None if node.entries is None else {name: _copy(each) for name, each in node.entries.items()}
    data = bytearray(node.data)
    return _Node(node.number, entries, data, bytearray(data), [], node.num_names, node.allocated, node.used_ns)


def _set(folder: _Node, name: str, node: _Node | None) -> None:
    assert folder.entries is not None
    if node is None:
        folder.entries.pop(name, None)
    else:
        folder.entries[name] = node


def _named(folder: _Node, name: str) -> _Node:
    if (node := (folder.entries or {}).get(name)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return node


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK
