"""broadcast from every root, of every dtype, size and layout; object lists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, run_ranks
from reference import DTYPES, SIZES, check_equal, make_input, movable


def _matrix(rank: int, world_size: int, dtypes: list[torch.dtype], sizes: list[int]) -> None:
    cases = Cases()
    for dtype in dtypes:
        if not movable(dtype):
            continue
        for count in sizes:
            for root in range(world_size):
                with cases(f"{dtype} n={count} root={root}"):
                    tensor = make_input(rank, count, dtype)
                    dist.broadcast(tensor, root)
                    check_equal(tensor, make_input(root, count, dtype))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_size_and_root(world_size: int) -> None:
    run_ranks(_matrix, world_size, DTYPES, SIZES)


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, [torch.float32, torch.uint8, torch.bool], SIZES)


def _source_unchanged(rank: int, world_size: int) -> None:
    for count in (5, 70001):
        tensor = make_input(0, count, torch.float32) if rank == 0 else torch.full((count,), -1.0)
        version = tensor._version
        dist.broadcast(tensor, 0)
        check_equal(tensor, make_input(0, count, torch.float32))
        assert rank != 0 or tensor._version >= version


def test_source_keeps_its_values() -> None:
    run_ranks(_source_unchanged, 3)


def _layouts(rank: int, world_size: int) -> None:
    cases = Cases()
    for shape in ((37, 41), (301, 401)):
        expected = make_input(1, shape[0] * shape[1], torch.float32).reshape(shape)
        with cases(f"contiguous to transposed {shape}"):
            if rank == 1:
                tensor = expected.clone()
            else:
                tensor = torch.zeros(shape[1], shape[0]).t()
                assert not tensor.is_contiguous()
            dist.broadcast(tensor, 1)
            check_equal(tensor, expected)
        with cases(f"strided on both sides {shape}"):
            base = torch.full((shape[0], 2 * shape[1]), -9.0)
            if rank == 1:
                base[:, ::2] = expected
            dist.broadcast(base[:, ::2], 1)
            check_equal(base[:, ::2], expected)
            assert (base[:, 1::2] == -9.0).all(), "elements between those of the view were changed"
        with cases(f"expanded source {shape}"):
            # An expanded tensor may be read, not written.
            tensor = torch.arange(shape[1]).expand(shape) if rank == 1 else torch.zeros(shape, dtype=torch.int64)
            dist.broadcast(tensor, 1)
            check_equal(tensor, torch.arange(shape[1]).repeat(shape[0], 1))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    gloo_lacks("needs dense tensors")
    run_ranks(_layouts, world_size)


def _special_values(rank: int, world_size: int) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000], dtype=torch.int64).to(torch.int32)
    tensor = bits.view(torch.float32).clone() if rank == 0 else torch.zeros(5)
    dist.broadcast(tensor, 0)
    check_equal(tensor.view(torch.int32), bits)


def test_bits_of_nan_and_denormals_are_kept() -> None:
    run_ranks(_special_values, 2)


def _objects(rank: int, world_size: int) -> None:
    for root in range(world_size):
        sent = [{"root": root, "data": list(range(100))}, None, "x" * 100000, torch.arange(5)]
        received = sent if rank == root else [None] * len(sent)
        dist.broadcast_object_list(received, src=root)
        assert received[:3] == sent[:3]
        check_equal(received[3], torch.arange(5))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_object_list(world_size: int) -> None:
    run_ranks(_objects, world_size)


def _group_root(rank: int, world_size: int) -> None:
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, group=group, group_src=0)
        assert tensor.item() == 0, "group rank 0 is global rank 0: new_group sorts the ranks"
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=2, group=group)
        assert tensor.item() == 2


def test_root_is_translated_to_the_group() -> None:
    run_ranks(_group_root, 3)
