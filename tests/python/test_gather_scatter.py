"""gather, scatter, their object forms, and torch 2.15's gather_single."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, on_gloo, run_ranks
from reference import COMPLEX, DTYPES, SIZES, all_inputs, check_equal, make_input, movable


def _gather_matrix(rank: int, world_size: int, dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for dtype in filter(movable, dtypes):
        if on_gloo() and dtype in COMPLEX:
            continue  # Gloo refuses them, here only.
        for count in SIZES:
            for root in {0, world_size - 1}:
                with cases(f"gather {dtype} n={count} root={root}"):
                    mine = make_input(rank, count, dtype)
                    outputs = [torch.zeros(count, dtype=dtype) for _ in range(world_size)] if rank == root else None
                    dist.gather(mine, outputs, dst=root)
                    check_equal(mine, make_input(rank, count, dtype))
                    for output, expected in zip(outputs or [], all_inputs(world_size, count, dtype), strict=False):
                        check_equal(output, expected)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_every_dtype_and_size(world_size: int) -> None:
    run_ranks(_gather_matrix, world_size, DTYPES)


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_gather_other_world_sizes(world_size: int) -> None:
    run_ranks(_gather_matrix, world_size, [torch.float32, torch.uint8])


def _scatter_matrix(rank: int, world_size: int, dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for dtype in filter(movable, dtypes):
        for count in SIZES:
            for root in {0, world_size - 1}:
                with cases(f"scatter {dtype} n={count} root={root}"):
                    output = torch.zeros(count, dtype=dtype)
                    inputs = [make_input(r, count, dtype, seed=9) for r in range(world_size)]
                    dist.scatter(output, inputs if rank == root else None, src=root)
                    check_equal(output, inputs[rank])
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_scatter_every_dtype_and_size(world_size: int) -> None:
    run_ranks(_scatter_matrix, world_size, DTYPES)


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_scatter_other_world_sizes(world_size: int) -> None:
    run_ranks(_scatter_matrix, world_size, [torch.float32, torch.uint8])


def _layouts(rank: int, world_size: int) -> None:
    inputs = [t.reshape(37, 41) for t in all_inputs(world_size, 37 * 41, torch.float32)]
    outputs = [torch.zeros(41, 37).t() for _ in range(world_size)] if rank == 1 else None
    dist.gather(inputs[rank].t().contiguous().t(), outputs, dst=1)
    for output, expected in zip(outputs or [], inputs, strict=False):
        check_equal(output, expected)
    output = torch.zeros(41, 37).t()
    dist.scatter(output, [t.t().contiguous().t() for t in inputs] if rank == 1 else None, src=1)
    check_equal(output, inputs[rank])


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    run_ranks(_layouts, world_size)


def _views(rank: int, world_size: int) -> None:
    # The chunks of one tensor, as DTensor passes them.
    whole = torch.arange(world_size * 1000, dtype=torch.float32).reshape(world_size, 1000)
    output = torch.zeros(1000)
    dist.scatter(output, list(whole.unbind()) if rank == 0 else None, src=0)
    check_equal(output, whole[rank])
    collected = torch.zeros_like(whole)
    dist.gather(output, list(collected.unbind()) if rank == 0 else None, dst=0)
    check_equal(collected, whole if rank == 0 else torch.zeros_like(whole))


@pytest.mark.parametrize("world_size", [2, 3])
def test_chunks_of_one_tensor(world_size: int) -> None:
    run_ranks(_views, world_size)


def _wrong_lists(rank: int, world_size: int) -> None:
    if rank == 0:
        expect_error(lambda: dist.gather(torch.ones(3), [torch.ones(3)] * (world_size + 1), dst=0))
        expect_error(lambda: dist.scatter(torch.ones(3), [torch.ones(3)] * (world_size + 1), src=0))
    else:
        expect_error(lambda: dist.gather(torch.ones(3), [torch.ones(3)] * world_size, dst=0))
        expect_error(lambda: dist.scatter(torch.ones(3), [torch.ones(3)] * world_size, src=0))


def test_lists_of_wrong_length_or_on_the_wrong_rank() -> None:
    run_ranks(_wrong_lists, 2)


def _objects(rank: int, world_size: int) -> None:
    for root in range(world_size):
        gathered = [None] * world_size if rank == root else None
        dist.gather_object({"rank": rank, "data": "y" * (1000 * rank)}, gathered, dst=root)
        if gathered is not None:
            assert gathered == [{"rank": r, "data": "y" * (1000 * r)} for r in range(world_size)]
        received: list[object] = [None]
        sent = [("for", r, "z" * (1000 * r)) for r in range(world_size)] if rank == root else None
        dist.scatter_object_list(received, sent, src=root)
        assert received == [("for", rank, "z" * (1000 * rank))]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_objects(world_size: int) -> None:
    run_ranks(_objects, world_size)


def _gather_single(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for count in SIZES:
            for root in {0, world_size - 1}:
                mine = make_input(rank, count, dtype)
                output = torch.zeros(world_size * count, dtype=dtype) if rank == root else None
                dist.gather_single(mine, output, group_dst=root)
                if output is not None:
                    check_equal(output, torch.cat(all_inputs(world_size, count, dtype)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="this torch has no gather_single")
def test_gather_single(world_size: int) -> None:
    gloo_lacks("no gather_single")
    run_ranks(_gather_single, world_size)
