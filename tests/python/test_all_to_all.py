"""all_to_all: list, single, with splits, empty splits, zero sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, on_gloo, run_ranks
from reference import DTYPES, SIZES, check_equal, make_input, movable


def _message(source: int, target: int, world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return make_input(source * world_size + target, count, dtype, seed=31)


def _matrix(rank: int, world_size: int, dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for dtype in filter(movable, dtypes):
        for count in SIZES:
            sent = [_message(rank, target, world_size, count, dtype) for target in range(world_size)]
            expected = [_message(source, rank, world_size, count, dtype) for source in range(world_size)]
            with cases(f"single {dtype} n={count}"):
                output = torch.zeros(world_size * count, dtype=dtype)
                dist.all_to_all_single(output, torch.cat(sent))
                check_equal(output, torch.cat(expected))
            with cases(f"list {dtype} n={count}"):
                outputs = [torch.zeros(count, dtype=dtype) for _ in range(world_size)]
                dist.all_to_all(outputs, sent)
                check_equal(torch.cat(outputs), torch.cat(expected))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_and_size(world_size: int) -> None:
    run_ranks(_matrix, world_size, DTYPES)


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, [torch.float32, torch.uint8])


def _count(source: int, target: int, turn: int) -> int:
    """How many rows `source` sends to `target`: some pairs none."""
    return [0, 3, 1, 1000, 20000][(2 * source + 3 * target + turn) % 5]


def _splits(rank: int, world_size: int) -> None:
    cases = Cases()
    for turn in range(5):
        sends = [_count(rank, target, turn) for target in range(world_size)]
        receives = [_count(source, rank, turn) for source in range(world_size)]
        for width in (1, 3):
            with cases(f"single, turn {turn}, rows of {width}"):
                rows = [
                    _message(rank, t, world_size, n * width, torch.float32).reshape(-1, width)
                    for t, n in enumerate(sends)
                ]
                expected = [
                    _message(s, rank, world_size, n * width, torch.float32).reshape(-1, width)
                    for s, n in enumerate(receives)
                ]
                output = torch.zeros(sum(receives), width)
                dist.all_to_all_single(output, torch.cat(rows), receives, sends)
                check_equal(output, torch.cat(expected))
            if on_gloo():
                continue  # Lists must have tensors of one size.
            with cases(f"list, turn {turn}, rows of {width}"):
                outputs = [torch.zeros(n, width) for n in receives]
                dist.all_to_all(outputs, rows)
                check_equal(torch.cat(outputs), torch.cat(expected))
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_uneven_splits(world_size: int) -> None:
    run_ranks(_splits, world_size)


def _nothing(rank: int, world_size: int) -> None:
    zeros = [0] * world_size
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0), zeros, zeros)
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0))
    dist.all_to_all([torch.zeros(0)] * world_size, [torch.zeros(0)] * world_size)
    # Only rank 0 sends, and only to the last rank.
    sends, receives = list(zeros), list(zeros)
    last = world_size - 1
    if rank == 0:
        sends[last] = 7
    if rank == last:
        receives[0] = 7
    output = torch.zeros(sum(receives))
    dist.all_to_all_single(output, torch.arange(float(sum(sends))), receives, sends)
    check_equal(output, torch.arange(7.0) if rank == last else torch.zeros(0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_zero_sizes(world_size: int) -> None:
    run_ranks(_nothing, world_size)


def _one_sided_splits(rank: int, world_size: int) -> None:
    rows = torch.full((world_size, 2), float(rank))
    for receives, sends in (([], [1] * world_size), ([1] * world_size, []), ([], []), (None, [1] * world_size)):
        output = torch.zeros(world_size, 2)
        dist.all_to_all_single(output, rows, receives, sends)
        check_equal(output, torch.arange(float(world_size)).reshape(-1, 1).expand(-1, 2).contiguous())


@pytest.mark.parametrize("world_size", [2, 3])
def test_empty_split_lists_mean_equal_splits(world_size: int) -> None:
    run_ranks(_one_sided_splits, world_size)


def _bad_splits(rank: int, world_size: int) -> None:
    expect_error(lambda: dist.all_to_all_single(torch.zeros(5), torch.zeros(5)))  # Not divisible by two.
    expect_error(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]))
    expect_error(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [4], [4]))
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.tensor([float(rank), rank + 10.0]))
    check_equal(output, torch.tensor([0.0, 1.0]) + 10.0 * rank)


def test_splits_that_do_not_add_up() -> None:
    gloo_lacks("checks the splits only partly")
    run_ranks(_bad_splits, 2)


def _overflowing_splits(rank: int, world_size: int) -> None:
    """Which add up to 6 in 64 bits."""
    big = [2**63 - 1, 2**63 - 1, 8]
    expect_error(lambda: dist.all_to_all_single(torch.zeros(6), torch.zeros(6), big, [2, 2, 2]))
    expect_error(lambda: dist.all_to_all_single(torch.zeros(6), torch.zeros(6), [2, 2, 2], big))
    dist.barrier()


def test_splits_that_overflow() -> None:
    gloo_lacks("checks the splits only partly")
    run_ranks(_overflowing_splits, 3)


def _disagreeing(rank: int, world_size: int) -> None:
    sends, receives = ([1, 2], [1, 3]) if rank == 0 else ([2, 1], [2, 1])
    expect_error(
        lambda: dist.all_to_all_single(torch.zeros(sum(receives)), torch.zeros(3), receives, sends), within_s=5
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def test_splits_that_disagree_between_ranks() -> None:
    gloo_lacks("hangs")
    run_ranks(_disagreeing, 2)


def _layouts(rank: int, world_size: int) -> None:
    sent = torch.stack([_message(rank, t, world_size, 20, torch.float32).reshape(4, 5) for t in range(world_size)])
    expected = torch.stack([_message(s, rank, world_size, 20, torch.float32).reshape(4, 5) for s in range(world_size)])
    output = torch.zeros(world_size, 5, 4).transpose(1, 2)
    dist.all_to_all([output[s] for s in range(world_size)], [part.t().contiguous().t() for part in sent])
    check_equal(output, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    run_ranks(_layouts, world_size)
