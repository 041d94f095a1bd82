"""Coalesced calls: the coalescing manager, and allreduce_coalesced of many small tensors of several dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from gpu_harness import on_nccl, run_ranks
from gpu_tensors import DEVICE, OPS, all_inputs, check_equal, check_reduced, is_reduced, make_input, on_gpu, output
from harness import Cases
from reference import reduce_op

RANKS = [1, 2, 4]
COUNTS = {
    "one": [100],
    "many small": [1 + 37 * i % 1000 for i in range(200)],
    "more than one launch's table": [1 + i % 5 for i in range(1500)],
    "small and large": [10, 3 << 20, 20, 0, 1 << 20, 30, 1, 40],
    "empty ones only": [0, 0, 0],
    "more than a buffer": [20 << 10] * 1000,
}


def _manager(is_async: bool) -> object:
    return dist.distributed_c10d._coalescing_manager(async_ops=is_async)


def _all_reduces(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for name, counts in COUNTS.items():
        with cases(name):
            dtype = torch.float32
            mine = [on_gpu(make_input(rank, count, dtype, seed=i % 8)) for i, count in enumerate(counts)]
            with _manager(is_async) as manager:
                for tensor in mine:
                    dist.all_reduce(tensor)
            if is_async:
                manager.wait()
            for i, (tensor, count) in enumerate(zip(mine, counts, strict=True)):
                check_reduced(tensor, all_inputs(n, count, dtype, seed=i % 8), "SUM")
    cases.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", RANKS)
def test_all_reduces(n: int, is_async: bool) -> None:
    run_ranks(_all_reduces, n, is_async)


def _operations(rank: int, n: int) -> None:
    cases = Cases()
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool]
    for op, dtype in itertools.product(OPS, dtypes):
        if not is_reduced(op, dtype):
            continue
        with cases(f"{op} {dtype}"):
            counts = [1 + 11 * i % 300 for i in range(50)]
            mine = [on_gpu(make_input(rank, count, dtype, seed=i)) for i, count in enumerate(counts)]
            with _manager(False):
                for tensor in mine:
                    dist.all_reduce(tensor, reduce_op(op))
            for i, (tensor, count) in enumerate(zip(mine, counts, strict=True)):
                check_reduced(tensor, all_inputs(n, count, dtype, seed=i), op)
    cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_operations(n: int) -> None:
    run_ranks(_operations, n)


def _several_dtypes(rank: int, n: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64]
    counts = [1 + 13 * i % 500 for i in range(150)]
    mine = [on_gpu(make_input(rank, c, dtypes[i % 5], seed=i)) for i, c in enumerate(counts)]
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    work = dist.group.WORLD.allreduce_coalesced(mine, options)
    if work is not None:
        work.wait()
    for i, (tensor, count) in enumerate(zip(mine, counts, strict=True)):
        check_reduced(tensor, all_inputs(n, count, dtypes[i % 5], seed=i), "SUM")


@pytest.mark.horon_only
@pytest.mark.parametrize("n", RANKS)
def test_several_dtypes_in_one_call(n: int) -> None:
    run_ranks(_several_dtypes, n)


def _gathers(rank: int, n: int, is_async: bool) -> None:
    for dtype in (torch.float32, torch.uint8):
        counts = [0, 1, 5, 1000, 65537]
        found = [output(n * count, dtype) for count in counts]
        with _manager(is_async) as manager:
            for tensor, count in zip(found, counts, strict=True):
                dist.all_gather_into_tensor(tensor, on_gpu(make_input(rank, count, dtype)))
        if is_async:
            manager.wait()
        for tensor, count in zip(found, counts, strict=True):
            for r in range(n):
                check_equal(tensor[r * count : (r + 1) * count], make_input(r, count, dtype))


def _scatters(rank: int, n: int, is_async: bool) -> None:
    counts = [0, 1, 5, 1000, 65537]
    found = [output(count, torch.float32) for count in counts]
    with _manager(is_async) as manager:
        for tensor, count in zip(found, counts, strict=True):
            dist.reduce_scatter_tensor(tensor, on_gpu(make_input(rank, n * count, torch.float32)))
    if is_async:
        manager.wait()
    for tensor, count in zip(found, counts, strict=True):
        parts = [whole[rank * count : (rank + 1) * count] for whole in all_inputs(n, n * count, torch.float32)]
        check_reduced(tensor, parts, "SUM")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("body", [_gathers, _scatters])
@pytest.mark.parametrize("n", RANKS)
def test_gathers_and_scatters(n: int, body: object, is_async: bool) -> None:
    run_ranks(body, n, is_async)  # type: ignore[arg-type]


def _with_device(rank: int, n: int) -> None:
    """The older form, in which each call goes to the backend between _start_coalescing and _end_coalescing."""
    mixed = [on_gpu(make_input(rank, 100 + i, torch.float32)) for i in range(20)]
    gathered = output(n * 7, torch.int32)
    with dist.distributed_c10d._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        for tensor in mixed[:10]:
            dist.all_reduce(tensor, async_op=True)
        dist.broadcast(mixed[10], n - 1, async_op=True)
        dist.all_to_all_single(gathered, on_gpu(make_input(rank, n * 7, torch.int32)), async_op=True)
    manager.wait()
    for i, tensor in enumerate(mixed[:10]):
        check_reduced(tensor, all_inputs(n, 100 + i, torch.float32), "SUM")
    check_equal(mixed[10], make_input(n - 1, 110, torch.float32))
    for r in range(n):
        sent = make_input(r, n * 7, torch.int32)
        check_equal(gathered[r * 7 : (r + 1) * 7], sent[rank * 7 : (rank + 1) * 7])


@pytest.mark.parametrize("n", RANKS)
def test_different_collectives_between_start_and_end(n: int) -> None:
    if on_nccl() and n > 1:
        pytest.skip("nccl: mixes all_reduce and send in one group only in some versions")
    run_ranks(_with_device, n)
