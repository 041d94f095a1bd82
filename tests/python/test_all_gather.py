"""all_gather: list, uneven list, into a tensor (flat and stacked), coalesced, objects."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, on_gloo, run_ranks
from reference import DTYPES, SIZES, SMALL_SIZES, all_inputs, check_equal, make_input, movable


def _matrix(rank: int, world_size: int, dtypes: list[torch.dtype], sizes: list[int]) -> None:
    cases = Cases()
    for dtype in filter(movable, dtypes):
        for count in sizes:
            inputs = all_inputs(world_size, count, dtype)
            mine = make_input(rank, count, dtype)
            with cases(f"list {dtype} n={count}"):
                outputs = [torch.zeros(count, dtype=dtype) for _ in range(world_size)]
                dist.all_gather(outputs, mine)
                for output, expected in zip(outputs, inputs, strict=True):
                    check_equal(output, expected)
            with cases(f"flat {dtype} n={count}"):
                flat = torch.zeros(world_size * count, dtype=dtype)
                dist.all_gather_into_tensor(flat, mine)
                check_equal(flat, torch.cat(inputs))
            with cases(f"input kept {dtype} n={count}"):
                check_equal(mine, inputs[rank])
            if on_gloo():
                continue  # Stacked outputs are refused.
            with cases(f"stacked {dtype} n={count}"):
                stacked = torch.zeros((world_size, count), dtype=dtype)
                dist.all_gather_into_tensor(stacked, mine)
                check_equal(stacked, torch.stack(inputs))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_and_size(world_size: int) -> None:
    run_ranks(_matrix, world_size, DTYPES, SIZES)


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, [torch.float32, torch.uint8, torch.complex64], SIZES)


def _in_place(rank: int, world_size: int) -> None:
    for count in (3, 1000, 300000):
        inputs = all_inputs(world_size, count, torch.float32)
        output = torch.zeros(world_size * count)
        mine = output[rank * count : (rank + 1) * count]
        mine.copy_(inputs[rank])
        dist.all_gather_into_tensor(output, mine)  # FSDP gathers into the tensor that holds the shard.
        check_equal(output, torch.cat(inputs))


@pytest.mark.parametrize("world_size", [2, 3])
def test_input_inside_output(world_size: int) -> None:
    run_ranks(_in_place, world_size)


def _shapes(rank: int, world_size: int) -> None:
    for shape in ((), (1,), (3, 5), (2, 3, 4)):
        count = int(torch.Size(shape).numel())
        inputs = [t.reshape(shape) for t in all_inputs(world_size, count, torch.float32)]
        outputs = [torch.zeros(shape) for _ in range(world_size)]
        dist.all_gather(outputs, inputs[rank].clone())
        check_equal(torch.stack(outputs), torch.stack(inputs))
        if shape:
            joined = torch.zeros((world_size * shape[0], *shape[1:]))
            dist.all_gather_into_tensor(joined, inputs[rank].clone())
            check_equal(joined, torch.cat(inputs))


@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes(world_size: int) -> None:
    run_ranks(_shapes, world_size)


def _layouts(rank: int, world_size: int) -> None:
    inputs = [t.reshape(37, 41) for t in all_inputs(world_size, 37 * 41, torch.float32)]
    mine = inputs[rank].t().contiguous().t()
    outputs = [torch.zeros(41, 37).t() for _ in range(world_size)]
    dist.all_gather(outputs, mine)
    for output, expected in zip(outputs, inputs, strict=True):
        check_equal(output, expected)
    joined = torch.zeros(world_size * 37, 41)
    dist.all_gather_into_tensor(joined, mine)
    check_equal(joined, torch.cat(inputs))


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    run_ranks(_layouts, world_size)


UNEVEN = [5, 0, 70001, 1, 1000]


def _uneven(rank: int, world_size: int) -> None:
    for turn in range(len(UNEVEN)):
        counts = [UNEVEN[(turn + r) % len(UNEVEN)] for r in range(world_size)]
        for dtype in (torch.float32, torch.int8):
            inputs = [make_input(r, counts[r], dtype) for r in range(world_size)]
            outputs = [torch.zeros(count, dtype=dtype) for count in counts]
            dist.all_gather(outputs, inputs[rank].clone())
            for output, expected in zip(outputs, inputs, strict=True):
                check_equal(output, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_uneven_sizes(world_size: int) -> None:
    gloo_lacks("needs outputs of one size")
    run_ranks(_uneven, world_size)


def _coalesced(rank: int, world_size: int) -> None:
    cases = Cases()
    counts = [1, 1000, 3, 65537] if on_gloo() else [1, 0, 1000, 3, 65537]
    for async_ops in (False, True):
        with cases(f"coalescing manager async={async_ops}"):
            outputs = [torch.zeros(world_size * count) for count in counts]
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for seed, (output, count) in enumerate(zip(outputs, counts, strict=True)):
                    dist.all_gather_into_tensor(output, make_input(rank, count, torch.float32, seed))
            if async_ops:
                manager.wait()
            for seed, (output, count) in enumerate(zip(outputs, counts, strict=True)):
                check_equal(output, torch.cat(all_inputs(world_size, count, torch.float32, seed)))
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalescing_manager(world_size: int) -> None:
    run_ranks(_coalesced, world_size)


def _coalesced_lists(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    counts = [3, 1000, 70001]
    lists = [[torch.zeros(count) for count in counts] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, [make_input(rank, count, torch.float32) for count in counts])
    for source, outputs in enumerate(lists):
        for output, count in zip(outputs, counts, strict=True):
            check_equal(output, make_input(source, count, torch.float32))


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_coalesced(world_size: int) -> None:
    run_ranks(_coalesced_lists, world_size)


def _objects(rank: int, world_size: int) -> None:
    for step in range(5):
        mine = {"rank": rank, "step": step, "data": "x" * (rank * 50000 * step)}
        gathered: list[object] = [None] * world_size
        dist.all_gather_object(gathered, mine)
        assert gathered == [{"rank": r, "step": step, "data": "x" * (r * 50000 * step)} for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_objects(world_size: int) -> None:
    run_ranks(_objects, world_size)


def _small_many(rank: int, world_size: int) -> None:
    for step in range(1000):
        count = SMALL_SIZES[1 + step % 3]
        output = torch.zeros(world_size * count)
        dist.all_gather_into_tensor(output, torch.full((count,), float(rank * 1000 + step)))
        expected = torch.arange(world_size).repeat_interleave(count) * 1000.0 + step
        assert torch.equal(output, expected), f"step {step}"


def test_many_in_a_row() -> None:
    run_ranks(_small_many, 2)
