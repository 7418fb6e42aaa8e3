import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from tiered_kv import (
    ConfigurationError,
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)

SPECS = [
    GPULoadStoreSpec([3, 1, 2], group=1),
    CPULoadStoreSpec([3, 1, 2], pool="engine"),
    FileLoadStoreSpec([0, 1, 0], ["/kv/a", "/kv/b"], offsets=[8192, 0, 0], lengths=[8192, 8192, 5000]),
    ObjectLoadStoreSpec([0, 1, 1], ["a", "b"], [0, 0, 8192], [8192] * 3, url="s3://bucket", endpoint="http://s3"),
    RemoteLoadStoreSpec([0, 2, 1], ["a", "b", "c"], url="redis://server:6379/0"),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.medium)


@each_spec
def test_a_spec_crosses_processes(spec: LoadStoreSpec) -> None:
    """What a scheduler decided arrives at a worker whole: equal, and as immutable as it was."""
    arrived = pickle.loads(pickle.dumps(spec))
    assert type(arrived) is type(spec)
    assert (arrived, hash(arrived)) == (spec, hash(spec))
    assert not arrived.ids.flags.writeable


@each_spec
def test_a_spec_cannot_be_changed(spec: LoadStoreSpec) -> None:
    """Neither its fields nor its ids: a decision stays what it was while bytes move."""
    with pytest.raises(FrozenInstanceError):
        spec.ids = np.zeros(3, np.int64)  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        spec.ids[0] = 7


@each_spec
def test_a_slice_is_a_spec_of_the_same_place(spec: LoadStoreSpec) -> None:
    """A part of the ids, all else as it was."""
    part = spec[1:]
    assert type(part) is type(spec)
    assert (len(part), list(part.ids)) == (2, list(spec.ids[1:]))
    assert spec[:] == spec


def test_a_spec_keeps_its_own_ids() -> None:
    """The caller may reuse the array it gave."""
    ids = np.array([1, 2, 3])
    spec = GPULoadStoreSpec(ids)
    ids[:] = 0
    assert list(spec.ids) == [1, 2, 3]


def test_specs_differ_where_anything_differs() -> None:
    """Ids, their order, the place and the medium all count; how the ids were written does not."""
    assert GPULoadStoreSpec([1, 2]) == GPULoadStoreSpec(np.array([1, 2], np.int32))
    others = [
        GPULoadStoreSpec([2, 1]), GPULoadStoreSpec([1, 2], group=1), CPULoadStoreSpec([1, 2]), GPULoadStoreSpec([1])
    ]  # fmt: skip
    assert all(GPULoadStoreSpec([1, 2]) != other for other in others)
    assert len({GPULoadStoreSpec([1, 2]), *others}) == 5


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], r"GPULoadStoreSpec ids must lie in \[0, 2\*\*63\), got -1 at position 1"),
        ([1.0], "flat sequence of ints"),
        ([True], "of bool"),
        ([[1]], r"shape \(1, 1\)"),
        (["1"], "flat sequence of ints"),
        (np.array([1, 2], dtype=object), r"got an array of objects: pass .astype\('int64'\)"),
        (3, "flat sequence of ints, got int"),
        (None, "got NoneType"),
        ([[1], [2, 3]], "got lists of several lengths"),
        ([1, None], "got None at position 1"),
        ([1, 2**64], f"got {2**64} at position 1"),
        ({1, 2}, r"got set: write list\(...\)"),
        ((each for each in range(2)), r"got generator: write list\(...\)"),
        (torch.zeros(2, device="meta"), r"got a tensor on meta: pass its .cpu\(\)"),
        (np.array([2**64 - 1], np.uint64), f"got {2**64 - 1} at position 0"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: object, message: str) -> None:
    """Before anything moves, with what was given."""
    with pytest.raises(ConfigurationError, match=message):
        GPULoadStoreSpec(ids)  # type: ignore[arg-type]


def test_no_ids_are_a_spec_too() -> None:
    """An empty batch is no special case."""
    assert len(GPULoadStoreSpec([])) == 0


def test_records_in_files_and_objects_are_ranges() -> None:
    """Each has a name, an offset and a length; a name may be of many, and a slice has its own."""
    spec = FileLoadStoreSpec([0, 1, 0], ["/a", "/b"], offsets=[4096, 0, 0], lengths=[5, 6, 7])
    assert list(spec.places()) == [("/a", 4096, 5), ("/b", 0, 6), ("/a", 0, 7)]
    assert list(spec[1:].places()) == [("/b", 0, 6), ("/a", 0, 7)]
    assert spec != FileLoadStoreSpec([0, 1, 0], ["/a", "/b"], offsets=[4096, 0, 1], lengths=[5, 6, 7])
    assert len(FileLoadStoreSpec([], [], [], [])) == 0
    for array in (spec.offsets, spec.lengths):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FileLoadStoreSpec([0, 1], ["/a"], [0, 0], [1, 1]), "ids number 1 names, got 1"),
        (lambda: FileLoadStoreSpec([0], ["/a"], [0, 0], [1]), "1 ids, 2 offsets and 1 lengths"),
        (lambda: ObjectLoadStoreSpec([0], ["a"], [0], [1, 2], "s3://b"), "1 ids, 1 offsets and 2 lengths"),
        (lambda: ObjectLoadStoreSpec([0], ["a"], [-1], [1], "s3://b"), r"ObjectLoadStoreSpec offsets must lie in \[0"),
        (lambda: RemoteLoadStoreSpec([0], "abc", "redis://server"), "names must be a list of strings, got 'abc'"),
        (lambda: RemoteLoadStoreSpec([1], ["a"], "redis://server"), "RemoteLoadStoreSpec ids number 1 names, got 1"),
    ],
)
def test_places_that_cannot_be_are_refused(make: Callable[[], LoadStoreSpec], message: str) -> None:
    """One place per record, and every name that is numbered is there."""
    with pytest.raises(ConfigurationError, match=message):
        make()
