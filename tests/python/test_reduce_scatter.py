"""reduce_scatter: list, uneven list, tensor (flat and stacked), coalesced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, on_gloo, run_ranks
from reference import DTYPES, OPS, SIZES, SMALL_SIZES, check_equal, check_reduced, make_input, reduce_op, supported


def _chunks(source: int, world_size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What rank `source` contributes to each rank's result."""
    return [make_input(source, count, dtype, seed=20 + target) for target in range(world_size)]


def _matrix(rank: int, world_size: int, ops: list[str], dtypes: list[torch.dtype], sizes: list[int]) -> None:
    cases = Cases()
    for op in ops:
        for dtype in dtypes:
            if not supported(op, dtype):
                continue
            for count in sizes:
                mine = _chunks(rank, world_size, count, dtype)
                parts = [make_input(source, count, dtype, seed=20 + rank) for source in range(world_size)]
                with cases(f"list {op} {dtype} n={count}"):
                    output = torch.zeros(count, dtype=dtype)
                    dist.reduce_scatter(output, mine, reduce_op(op))
                    check_reduced(output, parts, op)
                with cases(f"flat {op} {dtype} n={count}"):
                    output = torch.zeros(count, dtype=dtype)
                    flat = torch.cat(mine)
                    dist.reduce_scatter_tensor(output, flat, reduce_op(op))
                    check_reduced(output, parts, op)
                    check_equal(flat, torch.cat(mine))
                if on_gloo():
                    continue  # Stacked inputs are refused.
                with cases(f"stacked {op} {dtype} n={count}"):
                    output = torch.zeros(count, dtype=dtype)
                    dist.reduce_scatter_tensor(output, torch.stack(mine), reduce_op(op))
                    check_reduced(output, parts, op)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_operations_and_dtypes_small(world_size: int) -> None:
    run_ranks(_matrix, world_size, OPS, DTYPES, SMALL_SIZES[1:] if on_gloo() else SMALL_SIZES, timeout=120)


@pytest.mark.parametrize("world_size", [2, 3])
def test_large(world_size: int) -> None:
    run_ranks(_matrix, world_size, ["SUM", "AVG", "MAX"], [torch.float32, torch.bfloat16, torch.int64], SIZES[-2:])


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, ["SUM", "AVG", "MIN"], [torch.float32, torch.int64, torch.float16], [1, 1000, 65537])


def _in_place(rank: int, world_size: int) -> None:
    for count in (3, 1000, 300000):
        flat = torch.cat(_chunks(rank, world_size, count, torch.float32))
        output = flat[rank * count : (rank + 1) * count]
        dist.reduce_scatter_tensor(output, flat)
        check_reduced(output, [make_input(s, count, torch.float32, seed=20 + rank) for s in range(world_size)], "SUM")


@pytest.mark.parametrize("world_size", [2, 3])
def test_output_inside_input(world_size: int) -> None:
    run_ranks(_in_place, world_size)


UNEVEN = [5, 0, 70001, 1, 1000]


def _uneven(rank: int, world_size: int) -> None:
    for turn in range(len(UNEVEN)):
        counts = [UNEVEN[(turn + r) % len(UNEVEN)] for r in range(world_size)]
        inputs = [make_input(rank, counts[target], torch.float32, seed=20 + target) for target in range(world_size)]
        output = torch.zeros(counts[rank])
        dist.reduce_scatter(output, inputs)
        expected = [make_input(s, counts[rank], torch.float32, seed=20 + rank) for s in range(world_size)]
        check_reduced(output, expected, "SUM")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_uneven_sizes(world_size: int) -> None:
    run_ranks(_uneven, world_size)


def _coalesced(rank: int, world_size: int) -> None:
    counts = [1, 1000, 3, 65537] if on_gloo() else [1, 0, 1000, 3, 65537]
    for async_ops in (False, True):
        for op in ("SUM", "AVG"):
            outputs = [torch.zeros(count) for count in counts]
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for output, count in zip(outputs, counts, strict=True):
                    flat = torch.cat(_chunks(rank, world_size, count, torch.float32))
                    dist.reduce_scatter_tensor(output, flat, reduce_op(op))
            if async_ops:
                manager.wait()
            for output, count in zip(outputs, counts, strict=True):
                parts = [make_input(s, count, torch.float32, seed=20 + rank) for s in range(world_size)]
                check_reduced(output, parts, op)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalescing_manager(world_size: int) -> None:
    run_ranks(_coalesced, world_size)


def _layouts(rank: int, world_size: int) -> None:
    mine = [t.reshape(37, 41).t().contiguous().t() for t in _chunks(rank, world_size, 37 * 41, torch.float32)]
    parts = [make_input(s, 37 * 41, torch.float32, seed=20 + rank).reshape(37, 41) for s in range(world_size)]
    output = torch.zeros(41, 37).t()
    dist.reduce_scatter(output, mine)
    check_reduced(output, parts, "SUM")
    stacked = torch.stack(mine, dim=-1).movedim(-1, 0)
    assert not stacked.is_contiguous()
    output = torch.zeros(37, 41)
    dist.reduce_scatter_tensor(output, stacked)
    check_reduced(output, parts, "SUM")


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    gloo_lacks("needs dense tensors")
    run_ranks(_layouts, world_size)


def _half_rounding(rank: int, world_size: int) -> None:
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        flat = torch.full((5 * 1000,), big if rank == 0 else 1.0, dtype=dtype)
        output = torch.zeros(1000, dtype=dtype)
        dist.reduce_scatter_tensor(output, flat)
        check_equal(output, torch.full((1000,), big + 4, dtype=dtype))


def test_half_types_accumulate_in_float32() -> None:
    gloo_lacks("adds half types in half precision")
    run_ranks(_half_rounding, 5)
