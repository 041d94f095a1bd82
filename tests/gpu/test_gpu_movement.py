"""What only moves data, for CUDA tensors: every dtype, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from gpu_harness import on_nccl, on_simulator, run_ranks
from gpu_tensors import MOVED, NCCL_BACKEND_LACKS, SIZES, check_equal, moved_input, on_gpu, output
from harness import Cases

RANKS = [1, 2, 4]


def _dtypes() -> list[torch.dtype]:
    return [dtype for dtype in MOVED if not (on_nccl() and dtype in NCCL_BACKEND_LACKS)]


def _sizes(dtype: torch.dtype) -> list[int]:
    return SIZES if dtype in (torch.float32, torch.uint8) else [0, 3, 1000]


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _broadcast(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for count, root in itertools.product(_sizes(dtype), {0, n - 1}):
            with cases(f"{dtype} {count} elements from {root}"):
                tensor = on_gpu(moved_input(rank, count, dtype))
                _finish(dist.broadcast(tensor, root, async_op=is_async))
                check_equal(tensor, moved_input(root, count, dtype))
    cases.check()


def _all_gather_into_tensor(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for count in _sizes(dtype):
            with cases(f"{dtype} {count} elements"):
                found = output(n * count, dtype)
                mine = on_gpu(moved_input(rank, count, dtype))
                _finish(dist.all_gather_into_tensor(found, mine, async_op=is_async))
                for r, part in enumerate(found.split(count) if count else []):
                    check_equal(part, moved_input(r, count, dtype))
    cases.check()


def _all_gather(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for counts in ([1000] * n, [0] * n, [5 * r + 1 for r in range(n)], [r * 1000 for r in range(n)]):
            with cases(f"{dtype} {counts}"):
                found = [output(count, dtype) for count in counts]
                mine = on_gpu(moved_input(rank, counts[rank], dtype))
                _finish(dist.all_gather(found, mine, async_op=is_async))
                for r in range(n):
                    check_equal(found[r], moved_input(r, counts[r], dtype))
    cases.check()


def _gather(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for count, root in itertools.product((0, 3, 65537), {0, n - 1}):
            with cases(f"{dtype} {count} elements to {root}"):
                found = [output(count, dtype) for _ in range(n)] if rank == root else None
                _finish(dist.gather(on_gpu(moved_input(rank, count, dtype)), found, root, async_op=is_async))
                for r, tensor in enumerate(found or []):
                    check_equal(tensor, moved_input(r, count, dtype))
    cases.check()


def _scatter(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for count, root in itertools.product((0, 3, 65537), {0, n - 1}):
            with cases(f"{dtype} {count} elements from {root}"):
                found = output(count, dtype)
                sent = [on_gpu(moved_input(r, count, dtype, seed=root)) for r in range(n)] if rank == root else None
                _finish(dist.scatter(found, sent, root, async_op=is_async))
                check_equal(found, moved_input(rank, count, dtype, seed=root))
    cases.check()


def _all_to_all(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for unit in (0, 1, 1000):
            with cases(f"{dtype} unit {unit}"):
                # From r to s: a size of its own for each pair, some of them 0.
                counts = [[unit * ((r + 2 * s) % 4) for s in range(n)] for r in range(n)]
                found = [output(counts[r][rank], dtype) for r in range(n)]
                sent = [on_gpu(moved_input(rank, counts[rank][s], dtype, seed=s)) for s in range(n)]
                _finish(dist.all_to_all(found, sent, async_op=is_async))
                for r in range(n):
                    check_equal(found[r], moved_input(r, counts[r][rank], dtype, seed=rank))
    cases.check()


def _all_to_all_single(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    for dtype in _dtypes():
        for count in (0, 1, 1000):
            with cases(f"{dtype} even {count}"):
                found, mine = output(n * count, dtype), on_gpu(moved_input(rank, n * count, dtype))
                _finish(dist.all_to_all_single(found, mine, async_op=is_async))
                for r, part in enumerate(found.split(count) if count else []):
                    check_equal(part, moved_input(r, n * count, dtype)[rank * count : (rank + 1) * count])
            with cases(f"{dtype} splits {count}"):
                rows = [[count * ((r + 2 * s) % 3) for s in range(n)] for r in range(n)]
                received = [rows[r][rank] for r in range(n)]
                found = output(sum(received), dtype)
                mine = on_gpu(moved_input(rank, sum(rows[rank]), dtype))
                _finish(dist.all_to_all_single(found, mine, received, rows[rank], async_op=is_async))
                for r, part in enumerate(found.split(received)):
                    check_equal(part, moved_input(r, sum(rows[r]), dtype).split(rows[r])[rank])
    cases.check()


def _all_to_all_single_of_rows(rank: int, n: int, is_async: bool) -> None:
    rows = [[(r + s) % 3 for s in range(n)] for r in range(n)]
    received = [rows[r][rank] for r in range(n)]
    inputs = [moved_input(r, sum(rows[r]) * 5, torch.float32).reshape(-1, 5) for r in range(n)]
    found = output(sum(received) * 5, torch.float32).reshape(-1, 5)
    _finish(dist.all_to_all_single(found, on_gpu(inputs[rank]), received, rows[rank], async_op=is_async))
    check_equal(found, torch.cat([inputs[r].split(rows[r])[rank] for r in range(n)]))


def _tensors_that_share_memory(rank: int, n: int, is_async: bool) -> None:
    cases = Cases()
    dtype = torch.float32
    for count in (1, 1000, 100_000):
        received = [moved_input(r, count, dtype, seed=rank) for r in range(n)]
        sent = [moved_input(rank, count, dtype, seed=s) for s in range(n)]
        for name, order in (("in place", 1), ("in place, reversed", -1)):
            with cases(f"all_to_all {name} {count}"):
                inputs = [on_gpu(tensor) for tensor in sent]
                found = inputs[::order]
                _finish(dist.all_to_all(found, inputs, async_op=is_async))
                for r in range(n):
                    check_equal(found[r], received[r])
        with cases(f"all_to_all_single in place {count}"):
            whole = on_gpu(torch.cat(sent))
            _finish(dist.all_to_all_single(whole, whole, async_op=is_async))
            check_equal(whole, torch.cat(received))
        for slot in range(n):
            with cases(f"scatter into input {slot} {count}"):
                inputs = [on_gpu(moved_input(r, count, dtype, seed=5)) for r in range(n)]
                _finish(dist.scatter(inputs[slot], inputs if rank == 0 else None, async_op=is_async))
                check_equal(inputs[slot], moved_input(rank, count, dtype, seed=5))
            with cases(f"gather of output {slot} {count}"):
                found = [output(count, dtype) for _ in range(n)]
                found[slot].copy_(moved_input(rank, count, dtype))
                _finish(dist.gather(found[slot], found if rank == 0 else None, async_op=is_async))
                for r in range(n if rank == 0 else 0):
                    check_equal(found[r], moved_input(r, count, dtype))
            with cases(f"all_gather of output {slot} {count}"):
                found = [output(count, dtype) for _ in range(n)]
                found[slot].copy_(moved_input(rank, count, dtype))
                _finish(dist.all_gather(found, found[slot], async_op=is_async))
                for r in range(n):
                    check_equal(found[r], moved_input(r, count, dtype))
    cases.check()


BODIES = {
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single of rows": _all_to_all_single_of_rows,
    "tensors that share memory": _tensors_that_share_memory,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", list(BODIES))
@pytest.mark.parametrize("n", RANKS)
def test_bits_arrive(n: int, kind: str, is_async: bool) -> None:
    if on_nccl() and on_simulator() and kind == "all_gather":
        pytest.skip("nccl: flattens lists by kernels")
    if on_nccl() and kind == "tensors that share memory":
        pytest.skip("nccl: has no rule for it")
    run_ranks(BODIES[kind], n, is_async)
