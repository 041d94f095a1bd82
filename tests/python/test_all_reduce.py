"""all_reduce: every dtype and operation, sizes, layouts, rounding, NaN, coalescing, identical bits."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, on_gloo, run_ranks
from reference import (
    BITWISE,
    DTYPES,
    FLOATING,
    OPS,
    SIZES,
    SMALL_SIZES,
    all_inputs,
    as_bytes,
    check_equal,
    check_reduced,
    make_input,
    reduce_op,
    supported,
)


def _matrix(rank: int, world_size: int, ops: list[str], dtypes: list[torch.dtype], sizes: list[int]) -> int:
    cases = Cases()
    for op in ops:
        for dtype in dtypes:
            if not supported(op, dtype):
                continue
            for count in sizes:
                with cases(f"{op} {dtype} n={count}"):
                    tensor = make_input(rank, count, dtype)
                    dist.all_reduce(tensor, reduce_op(op))
                    check_reduced(tensor, all_inputs(world_size, count, dtype), op)
    cases.check()
    return cases.count


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_operations_and_dtypes_small(world_size: int) -> None:
    counts = run_ranks(_matrix, world_size, OPS, DTYPES, SMALL_SIZES)
    assert min(counts) >= (200 if on_gloo() else 390)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sum_of_every_dtype_large(world_size: int) -> None:
    run_ranks(_matrix, world_size, ["SUM"], DTYPES, [65537, 300000])


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_large(world_size: int) -> None:
    run_ranks(_matrix, world_size, OPS[1:], [torch.float32, torch.int32, torch.bfloat16], [65537, 300000])


@pytest.mark.parametrize("world_size", [1, 4, 5])
def test_fewer_combinations_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, OPS, [torch.float32, torch.bfloat16, torch.int64, torch.bool], [*SMALL_SIZES, 65537])


def _undefined(rank: int, world_size: int) -> None:
    cases = Cases()
    for op in sorted(BITWISE):
        for dtype in (*FLOATING, torch.complex64):
            with cases(f"{op} {dtype}"):
                expect_error(lambda: dist.all_reduce(torch.ones(4, dtype=dtype), reduce_op(op)))  # noqa: B023
    cases.check()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    check_equal(tensor, torch.full((4,), float(world_size)))


def test_bitwise_operations_refuse_floating_types() -> None:
    run_ranks(_undefined, 2)


def _half_rounding(rank: int, world_size: int) -> None:
    # Added in half precision, big + 1 stays big at every step. Added in float32 and rounded once, the ones count.
    for dtype, big, expected in ((torch.float16, 2048.0, 2052.0), (torch.bfloat16, 256.0, 260.0)):
        for count in (1, 1000, 300000):
            tensor = torch.full((count,), big if rank == 0 else 1.0, dtype=dtype)
            dist.all_reduce(tensor)
            check_equal(tensor, torch.full((count,), expected, dtype=dtype))


def test_half_types_accumulate_in_float32() -> None:
    gloo_lacks("adds half types in half precision")
    run_ranks(_half_rounding, 5)


def _half_range(rank: int, world_size: int) -> None:
    tensor = torch.full((1000,), [60000.0, 60000.0, -60000.0][rank], dtype=torch.float16)
    dist.all_reduce(tensor)
    check_equal(tensor, torch.full((1000,), 60000.0, dtype=torch.float16))
    tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    check_equal(tensor, torch.full((1000,), 60000.0, dtype=torch.float16))


def test_half_sums_do_not_overflow_on_the_way() -> None:
    gloo_lacks("adds half types in half precision")
    run_ranks(_half_range, 3)


def _integer_average(rank: int, world_size: int) -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        tensor = torch.tensor([rank, -rank, 7, -7, 1, -1], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        check_equal(tensor, torch.tensor([0, 0, 7, -7, 1, -1], dtype=dtype))
        tensor = torch.tensor([5 if rank == 0 else 2, -5 if rank == 0 else -2], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        check_equal(tensor, torch.tensor([3, -3], dtype=dtype))


def test_integer_average_truncates_towards_zero() -> None:
    gloo_lacks("no AVG of integers")
    run_ranks(_integer_average, 2)


def _bool_sum(rank: int, world_size: int) -> None:
    for count in (2, 1000, 70001):
        tensor = torch.tensor([True, rank == 1, False, True]).repeat(count)
        dist.all_reduce(tensor)
        assert set(as_bytes(tensor).unique().tolist()) == {0, 1}, "a bool holds something other than 0 and 1"
        check_equal(tensor, torch.tensor([True, True, False, True]).repeat(count))


@pytest.mark.parametrize("world_size", [2, 3])
def test_bool_sum_is_or(world_size: int) -> None:
    gloo_lacks("adds bools as bytes")
    run_ranks(_bool_sum, world_size)


def _nan(rank: int, world_size: int) -> None:
    cases = Cases()
    for dtype in FLOATING:
        for op in ("MIN", "MAX", "SUM", "PRODUCT"):
            for count in (1, 7, 1000, 70001):
                for owner in range(world_size):
                    with cases(f"{op} {dtype} n={count} NaN on rank {owner}"):
                        tensor = torch.full((count,), float(rank + 1), dtype=dtype)
                        if rank == owner:
                            tensor[count // 2] = float("nan")
                        dist.all_reduce(tensor, reduce_op(op))
                        where = tensor.isnan().nonzero().flatten().tolist()
                        assert where == [count // 2], f"NaN at {where[:5]}, not at {count // 2}"
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_propagates(world_size: int) -> None:
    gloo_lacks("MIN and MAX drop NaN")
    run_ranks(_nan, world_size)


def _layouts(rank: int, world_size: int) -> None:
    cases = Cases()
    for shape in ((37, 41), (301, 401)):
        count = shape[0] * shape[1]
        inputs = [t.reshape(shape) for t in all_inputs(world_size, count, torch.float32)]
        mine = inputs[rank]
        with cases(f"transposed {shape}"):
            tensor = mine.t().contiguous().t()
            assert not tensor.is_contiguous()
            dist.all_reduce(tensor)
            check_reduced(tensor, inputs, "SUM")
        with cases(f"every second element {shape}"):
            base = torch.full((shape[0], 2 * shape[1]), -9.0)
            base[:, ::2] = mine
            dist.all_reduce(base[:, ::2], dist.ReduceOp.MAX)
            check_reduced(base[:, ::2].contiguous(), inputs, "MAX")
            assert (base[:, 1::2] == -9.0).all(), "elements between those of the view were changed"
        with cases(f"a column block {shape}"):
            base = torch.full((shape[0], shape[1] + 5), -9.0)
            base[:, 2:-3] = mine
            dist.all_reduce(base[:, 2:-3])
            check_reduced(base[:, 2:-3].contiguous(), inputs, "SUM")
            assert (base[:, :2] == -9.0).all() and (base[:, -3:] == -9.0).all(), "elements beside the view were changed"
        with cases(f"storage offset {shape}"):
            base = torch.cat([torch.full((3,), -9.0), mine.reshape(-1), torch.full((3,), -9.0)])
            dist.all_reduce(base[3:-3])
            check_reduced(base[3:-3].reshape(shape), inputs, "SUM")
            assert (base[:3] == -9.0).all() and (base[-3:] == -9.0).all(), "elements beside the view were changed"
    with cases("channels last"):
        tensor = (
            make_input(rank, 2 * 3 * 5 * 7, torch.float32).reshape(2, 3, 5, 7).to(memory_format=torch.channels_last)
        )
        dist.all_reduce(tensor)
        check_reduced(tensor, all_inputs(world_size, 210, torch.float32), "SUM")
    with cases("zero dimensions"):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor)
        assert tensor.shape == () and tensor.item() == sum(range(world_size))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts(world_size: int) -> None:
    gloo_lacks("needs dense tensors")
    run_ranks(_layouts, world_size)


COALESCED_COUNTS = [1, 0, 1000, 3, 65537, 17]


def _coalesced(rank: int, world_size: int) -> None:
    cases = Cases()
    for op in ("SUM", "MAX"):
        for dtype in (torch.float32, torch.int64):
            with cases(f"all_reduce_coalesced {op} {dtype}"):
                tensors = [make_input(rank, n, dtype, seed) for seed, n in enumerate(COALESCED_COUNTS)]
                dist.all_reduce_coalesced(tensors, reduce_op(op))
                for seed, tensor in enumerate(tensors):
                    check_reduced(tensor, all_inputs(world_size, tensor.numel(), dtype, seed), op)
            for async_ops in (False, True):
                with cases(f"coalescing manager {op} {dtype} async={async_ops}"):
                    tensors = [make_input(rank, n, dtype, seed) for seed, n in enumerate(COALESCED_COUNTS)]
                    with dist._coalescing_manager(async_ops=async_ops) as manager:
                        for tensor in tensors:
                            dist.all_reduce(tensor, reduce_op(op))
                    if async_ops:
                        manager.wait()
                    for seed, tensor in enumerate(tensors):
                        check_reduced(tensor, all_inputs(world_size, tensor.numel(), dtype, seed), op)
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced(world_size: int) -> None:
    run_ranks(_coalesced, world_size)


def _digests(rank: int, world_size: int) -> list[str]:
    digests = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for op in ("SUM", "AVG", "PRODUCT"):
            for count in SIZES[1:]:
                digest = None
                for _ in range(3):
                    tensor = make_input(rank, count, dtype, seed=5) * 1.001
                    dist.all_reduce(tensor, reduce_op(op))
                    again = hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()
                    assert digest in (None, again), f"{op} {dtype} n={count}: other bits in a second run"
                    digest = again
                digests.append(f"{op} {dtype} n={count} {digest}")
    return digests


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_identical_bits_on_all_ranks_and_from_run_to_run(world_size: int) -> None:
    first = run_ranks(_digests, world_size, timeout=120)
    for rank in range(1, world_size):
        assert first[rank] == first[0], f"rank {rank} has other bits than rank 0"
    assert run_ranks(_digests, world_size, timeout=120)[0] == first[0], "other bits in a second group"


def _wrap(rank: int, world_size: int) -> None:
    for dtype, value in ((torch.int8, 100), (torch.uint8, 200), (torch.int32, 2**31 - 1), (torch.int64, 2**63 - 1)):
        tensor = torch.full((1000,), value, dtype=dtype)
        dist.all_reduce(tensor)
        check_equal(tensor, torch.full((1000,), value, dtype=dtype) + torch.full((1000,), value, dtype=dtype))


def test_integer_overflow_wraps() -> None:
    run_ranks(_wrap, 2)


def _many(rank: int, world_size: int) -> None:
    for step in range(3000):
        tensor = torch.full((1 + step % 37,), float(rank + step))
        dist.all_reduce(tensor)
        expected = float(sum(range(world_size)) + world_size * step)
        assert (tensor == expected).all(), f"step {step}: {tensor[0].item()}, not {expected}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_in_a_row(world_size: int) -> None:
    run_ranks(_many, world_size, timeout=120)
