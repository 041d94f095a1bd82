"""all_reduce, reduce and reduce_scatter of CUDA tensors: every dtype and operation, against the CPU's reduction."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from gpu_harness import on_nccl, on_simulator, run_ranks
from gpu_tensors import (
    FLOAT8,
    NCCL_BACKEND_LACKS,
    NOT_REDUCED,
    OPS,
    REDUCED,
    SIZES,
    all_inputs,
    check_equal,
    check_reduced,
    is_reduced,
    make_input,
    on_cpu,
    on_gpu,
    output,
)
from harness import Cases, expect_error
from reference import reduce_op

RANKS = [1, 2, 4]
WAYS = [torch.float32, torch.bfloat16, torch.int64]
"""What each way of calling is tried with; all types go through all_reduce and reduce_scatter_tensor."""


def _combinations() -> list[tuple[str, torch.dtype]]:
    lacks = NCCL_BACKEND_LACKS if on_nccl() else []
    dtypes = [dtype for dtype in REDUCED if dtype not in lacks]
    return [(op, dtype) for op, dtype in itertools.product(OPS, dtypes) if is_reduced(op, dtype)]


def _all_reduce(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for op, dtype in _combinations():
        for count in SIZES if dtype in WAYS else [0, 1, 1000]:
            with cases(f"{op} {dtype} {count} elements"):
                tensor = on_gpu(make_input(rank, count, dtype))
                work = dist.all_reduce(tensor, reduce_op(op), async_op=is_async)
                if work is not None:
                    work.wait()
                check_reduced(tensor, all_inputs(n, count, dtype), op)
    cases.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", RANKS)
def test_all_reduce(n: int, is_async: bool) -> None:
    run_ranks(_all_reduce, n, is_async)


def _reduce(rank: int, n: int) -> None:
    cases = Cases()
    for (op, dtype), root in itertools.product(itertools.product(OPS, WAYS), range(n)):
        if is_reduced(op, dtype):
            for count in (0, 3, 65537):
                with cases(f"{op} {dtype} {count} elements to {root}"):
                    tensor = on_gpu(make_input(rank, count, dtype))
                    dist.reduce(tensor, root, reduce_op(op))
                    if rank == root:
                        check_reduced(tensor, all_inputs(n, count, dtype), op)
                    work = dist.reduce(on_gpu(make_input(rank, count, dtype)), root, reduce_op(op), async_op=True)
                    work.wait()
    cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_reduce(n: int) -> None:
    run_ranks(_reduce, n)


def _reduce_scatter_tensor(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for op, dtype in _combinations():
        for count in SIZES if dtype in WAYS else [0, 3, 1000]:
            with cases(f"{op} {dtype} {count} elements"):
                mine = on_gpu(make_input(rank, n * count, dtype))
                found = output(count, dtype)
                work = dist.reduce_scatter_tensor(found, mine, reduce_op(op), async_op=is_async)
                if work is not None:
                    work.wait()
                parts = [whole[rank * count : (rank + 1) * count] for whole in all_inputs(n, n * count, dtype)]
                check_reduced(found, parts, op)
                check_equal(mine, make_input(rank, n * count, dtype))
    cases.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", RANKS)
def test_reduce_scatter_tensor(n: int, is_async: bool) -> None:
    run_ranks(_reduce_scatter_tensor, n, is_async)


def _reduce_scatter(rank: int, n: int) -> None:
    cases = Cases()
    for op, dtype in itertools.product(OPS, WAYS):
        if is_reduced(op, dtype):
            # Uneven: rank r receives r + 1 rows. Equal counts: separate tensors, which are not one piece of memory.
            for counts in ([1000] * n, [0] * n, [7 * (r + 1) for r in range(n)]):
                with cases(f"{op} {dtype} {counts}"):
                    lists = [[make_input(r, counts[s], dtype, seed=s) for s in range(n)] for r in range(n)]
                    found = output(counts[rank], dtype)
                    dist.reduce_scatter(found, [on_gpu(t) for t in lists[rank]], reduce_op(op))
                    check_reduced(found, [lists[r][rank] for r in range(n)], op)
    cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_reduce_scatter_of_lists(n: int) -> None:
    if on_nccl() and on_simulator():
        pytest.skip("nccl: flattens lists by kernels")
    run_ranks(_reduce_scatter, n)


def _refused(rank: int, n: int) -> None:
    cases = Cases()
    for op, dtype in itertools.product(("BAND", "BOR", "BXOR"), (torch.int32, torch.bool)):
        with cases(f"{op} {dtype}"):
            tensor = on_gpu(make_input(rank, 5, dtype))
            expect_error(lambda t=tensor, o=op: dist.all_reduce(t, reduce_op(o)), "" if on_nccl() else op)
    if not on_nccl():
        for dtype in NOT_REDUCED:
            with cases(f"{dtype}"):
                tensor = on_gpu(make_input(rank, 5, dtype))
                expect_error(lambda t=tensor: dist.all_reduce(t), "int16")
        with cases("MAX of complex"):
            tensor = on_gpu(make_input(rank, 5, torch.complex64))
            expect_error(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX), "MAX")
        with cases("AVG of bool"):
            tensor = on_gpu(make_input(rank, 5, torch.bool))
            expect_error(lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG), "AVG", "bool")
    with cases("the group works on"):
        tensor = on_gpu(make_input(rank, 5, torch.float32))
        dist.all_reduce(tensor)
        check_reduced(tensor, all_inputs(n, 5, torch.float32), "SUM")
    cases.check()


@pytest.mark.parametrize("n", [1, 2])
def test_what_nccl_lacks_is_an_error_and_the_group_works_on(n: int) -> None:
    run_ranks(_refused, n)


def _float8(rank: int, n: int) -> None:
    cases = Cases()
    for dtype in FLOAT8:
        with cases(f"{dtype}"):
            inputs = [((torch.arange(1000) + r) % 3).float().to(dtype) for r in range(n)]  # Sums are exact.
            tensor = on_gpu(inputs[rank])
            try:
                dist.all_reduce(tensor)
            except Exception as error:
                text = str(error).lower()
                assert "float8" in text or "cast" in text, f"{type(error).__name__}: {error}"
            else:
                expected = torch.stack([t.float() for t in inputs]).sum(0)
                assert torch.equal(on_cpu(tensor).float(), expected)
    with cases("the group works on"):
        tensor = on_gpu(make_input(rank, 5, torch.float32))
        dist.all_reduce(tensor)
        check_reduced(tensor, all_inputs(n, 5, torch.float32), "SUM")
    cases.check()


@pytest.mark.parametrize("n", [1, 2])
def test_float8_is_reduced_rightly_or_refused(n: int) -> None:
    run_ranks(_float8, n)


def _half_averages(rank: int, n: int) -> None:
    cases = Cases()
    for dtype in (torch.float16, torch.bfloat16):
        with cases(f"{dtype} coalesced"):
            inputs = [[make_input(r, 100, dtype, seed=s) for s in range(64)] for r in range(n)]
            mine = [on_gpu(t) for t in inputs[rank]]
            with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
                for tensor in mine:
                    dist.all_reduce(tensor, dist.ReduceOp.AVG)
            manager.wait()
            for index, tensor in enumerate(mine):
                check_reduced(tensor, [inputs[r][index] for r in range(n)], "AVG")
    cases.check()


@pytest.mark.parametrize("n", [2, 3])
def test_averages_of_half_types_by_three_are_as_close_as_sums(n: int) -> None:
    """1/3 rounded to bfloat16 is 0.2 % off: the factor belongs into float32, while unpacking."""
    if on_nccl() and n == 3:
        pytest.skip("nccl: multiplies by 1/3 rounded to the type")
    run_ranks(_half_averages, n)
