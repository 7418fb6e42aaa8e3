"""The host slab: slots, headers, other processes, closing."""

import fcntl
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiered_kv.memory import HostSlab
from tiered_kv.memory.host import touch
from tiered_kv.values.errors import ClosedError, ConfigurationError

STRIDE = 8192
PAYLOAD = 5000


@pytest.fixture
def slab() -> HostSlab:
    """Six slots with padding."""
    return HostSlab(6, STRIDE, PAYLOAD, name="test")


def test_rows_payloads_and_padded_slots_are_the_same_memory(slab: HostSlab) -> None:
    """Copies go by rows and I/O by buffers; each slot starts on a page."""
    assert slab.rows.shape == (6, STRIDE // 8)
    assert slab.rows.data_ptr() % 4096 == 0
    slab.payload(2)[-1] = 7
    assert slab.padded(2)[PAYLOAD - 1] == 7
    assert slab.rows[2].view(torch.uint8)[PAYLOAD - 1] == 7
    assert not slab.rows[[0, 1, 3, 4, 5]].any()
    assert (len(slab.payload(2)), len(slab.padded(2)), slab.num_bytes) == (PAYLOAD, STRIDE, 6 * STRIDE)


def test_blocks_are_lent_with_headers_of_their_own(slab: HostSlab) -> None:
    """No two blocks in flight share a header page, and headers are lent again once they are given back."""
    first, second = slab.lend_blocks([4, 1]), slab.lend_blocks(range(3))
    for number, block in enumerate([*first, *second]):
        block.header[:] = bytes([number]) * 4096
    assert [block.header[4095] for block in [*first, *second]] == [0, 1, 2, 3, 4]
    assert [len(block.payload) for block in first] == [PAYLOAD, PAYLOAD]
    first[0].payload[0] = 9
    assert slab.payload(4)[0] == 9
    lent = set()
    for _ in range(200):
        blocks = slab.lend_blocks([0])
        lent.add(torch.frombuffer(blocks[0].header, dtype=torch.uint8).data_ptr())
        blocks.give_back()
    assert len(lent) == 1


@pytest.mark.slow
def test_another_process_attaches_the_same_memory(slab: HostSlab) -> None:
    """A worker that inherits the descriptor reads our bytes and we read its, each through an object of its own."""
    slab.payload(3)[:5] = b"hello"
    code = (
        "import sys; from tiered_kv.memory import HostSlab\n"
        f"slab = HostSlab(6, {STRIDE}, {PAYLOAD}, fd=int(sys.argv[1]))\n"
        "slab.payload(5)[:5] = bytes(slab.payload(3)[:5]).upper()\n"
        "slab.close()"
    )
    folder = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, str(slab.fd)], pass_fds=[slab.fd], cwd=folder, check=True)
    assert bytes(slab.payload(5)[:5]) == b"HELLO"


def test_who_may_only_read_the_memory_cannot_open_it_to_write(slab: HostSlab) -> None:
    """A descriptor opens the file anew, with the rights of the file: those are its user's alone."""
    assert os.fstat(slab.fd).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_bytes", [0, 7 * STRIDE])
def test_who_has_the_memory_cannot_change_its_size(slab: HostSlab, num_bytes: int) -> None:
    """One process that shrank it would end every other one by a signal; and nobody can allow it again."""
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_slab_of_other_sizes_is_not_attached(slab: HostSlab) -> None:
    """A worker set up otherwise hears so, instead of reading past the end."""
    with pytest.raises(ConfigurationError, match="has 49152 bytes, 57344 are expected"):
        HostSlab(7, STRIDE, PAYLOAD, fd=slab.fd)


@pytest.mark.parametrize(("num_slots", "stride", "payload"), [(-1, 4096, 1), (1, 4097, 1), (1, 4096, 4097), (1, 0, 0)])
def test_impossible_sizes_are_refused(num_slots: int, stride: int, payload: int) -> None:
    """Before any memory is taken, with the numbers."""
    with pytest.raises(ConfigurationError, match=f"{num_slots} slots every {stride} bytes"):
        HostSlab(num_slots, stride, payload)


@pytest.mark.parametrize(("limit", "num_bytes"), [(resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_AS, 1 << 40)])
def test_what_the_system_refuses_is_said_with_its_size(limit: int, num_bytes: int) -> None:
    """And leaves no descriptor behind."""
    before, hard = resource.getrlimit(limit)
    num_open = _num_open()
    resource.setrlimit(limit, (num_bytes, hard))
    try:
        with pytest.raises(ConfigurationError, match=r"GiB of host memory for 'large' cannot be had: .*ulimit"):
            HostSlab(num_bytes // 4096 + 1, 4096, 4096, name="large")
    finally:
        resource.setrlimit(limit, (before, hard))
    assert _num_open() == num_open


def test_a_slab_without_slots_works() -> None:
    """A host tier of size 0 needs no case of its own."""
    slab = HostSlab(0, 4096, 4096)
    assert slab.rows.shape == (0, 512)
    assert not len(slab.lend_blocks([]))
    with pytest.raises(ConfigurationError, match="slot 0 is not one of the 0"):
        slab.payload(0)
    slab.close()


def test_closing_leaves_views_alive(slab: HostSlab) -> None:
    """A copy or a client may still hold memory of the slab when it is closed: it stays mapped until they let go."""
    rows, payload = slab.rows, slab.payload(1)
    rows[1] = 3
    slab.close()
    slab.close()
    assert payload[0] == 3
    rows[1] = 4
    assert payload[0] == 4
    with pytest.raises(ClosedError, match="test"):
        slab.padded(1)


def test_who_forgets_a_slab_keeps_no_memory() -> None:
    """Its descriptor goes with the last reference to it."""
    slab = HostSlab(2, STRIDE, PAYLOAD)
    there = os.fstat(slab.fd)
    del slab
    gc.collect()
    assert not any(path.exists() and os.path.samestat(path.stat(), there) for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_slot_beyond_either_end_is_refused(slab: HostSlab, slot: int) -> None:
    """Memory that is counted from the end would be another block's."""
    with pytest.raises(ConfigurationError, match=f"slot {slot} is not one of the 6"):
        slab.padded(slot)


def test_pages_come_when_they_are_touched_and_go_when_given_back() -> None:
    """Of these slots alone; as the system counts them. What is given back reads as zeros."""
    stride = 64 << 10
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * stride)
    slab = HostSlab(8, stride, stride, fd=fd)

    def num_slots_there() -> float:
        return os.fstat(fd).st_blocks * 512 / stride

    try:
        slab.rows.fill_(7)
        slab.give_back(1, 4)
        slab.give_back(5, 5)
        assert num_slots_there() == 5
        assert slab.rows[[0, 4, 5, 6, 7]].eq(7).all()
        touch(slab.rows[2:4])
        assert num_slots_there() in {5, 7}  # before Linux 5.14 they come when they are written to
        assert not slab.rows[1:4].any()
    finally:
        slab.close()
        os.close(fd)


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
