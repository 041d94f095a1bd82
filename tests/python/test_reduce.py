"""reduce to every root: the root has the result; what the others hold afterwards is not specified."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, run_ranks
from reference import (
    DTYPES,
    OPS,
    SIZES,
    SMALL_SIZES,
    all_inputs,
    check_equal,
    check_reduced,
    make_input,
    reduce_op,
    supported,
)


def _matrix(rank: int, world_size: int, ops: list[str], dtypes: list[torch.dtype], sizes: list[int]) -> None:
    cases = Cases()
    for op in ops:
        for dtype in dtypes:
            if not supported(op, dtype):
                continue
            for count in sizes:
                for root in {0, world_size - 1}:
                    with cases(f"{op} {dtype} n={count} root={root}"):
                        tensor = make_input(rank, count, dtype)
                        dist.reduce(tensor, root, reduce_op(op))
                        if rank == root:
                            check_reduced(tensor, all_inputs(world_size, count, dtype), op)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_operations_and_dtypes_small(world_size: int) -> None:
    run_ranks(_matrix, world_size, OPS, DTYPES, SMALL_SIZES)


@pytest.mark.parametrize("world_size", [2, 3])
def test_large(world_size: int) -> None:
    run_ranks(_matrix, world_size, ["SUM", "MAX"], [torch.float32, torch.bfloat16, torch.int64], SIZES[-2:])


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, ["SUM", "MIN", "BOR"], [torch.float32, torch.int64, torch.bool], SMALL_SIZES)


def _every_root(rank: int, world_size: int) -> None:
    for root in range(world_size):
        for count in (3, 65537):
            tensor = make_input(rank, count, torch.float64, seed=root)
            dist.reduce(tensor, root)
            if rank == root:
                check_reduced(tensor, all_inputs(world_size, count, torch.float64, seed=root), "SUM")


@pytest.mark.parametrize("world_size", [2, 5])
def test_every_root(world_size: int) -> None:
    run_ranks(_every_root, world_size)


def _layouts(rank: int, world_size: int) -> None:
    shape = (37, 41)
    inputs = [t.reshape(shape) for t in all_inputs(world_size, 37 * 41, torch.float32)]
    tensor = inputs[rank].t().contiguous().t()
    dist.reduce(tensor, 1)
    if rank == 1:
        check_reduced(tensor, inputs, "SUM")
    base = torch.full((37, 82), -9.0)
    base[:, ::2] = inputs[rank]
    dist.reduce(base[:, ::2], 1)
    if rank == 1:
        check_reduced(base[:, ::2].contiguous(), inputs, "SUM")
    assert (base[:, 1::2] == -9.0).all(), "elements between those of the view were changed"


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    gloo_lacks("needs dense tensors")
    run_ranks(_layouts, world_size)


def _half_rounding(rank: int, world_size: int) -> None:
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        tensor = torch.full((1000,), big if rank == 0 else 1.0, dtype=dtype)
        dist.reduce(tensor, 4)
        if rank == 4:
            check_equal(tensor, torch.full((1000,), big + 4, dtype=dtype))


def test_half_types_accumulate_in_float32() -> None:
    gloo_lacks("adds half types in half precision")
    run_ranks(_half_rounding, 5)


def _mixed_roots(rank: int, world_size: int) -> None:
    works, tensors = [], []
    for step in range(60):
        tensor = torch.full((100,), float(rank + step))
        works.append(dist.reduce(tensor, step % world_size, async_op=True))
        tensors.append(tensor)
    for step, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        if step % world_size == rank:
            assert (tensor == sum(range(world_size)) + world_size * step).all(), f"step {step}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_roots_take_turns(world_size: int) -> None:
    run_ranks(_mixed_roots, world_size)
