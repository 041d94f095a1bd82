"""Tensors that are not a plain aligned piece of memory, and those with more bytes than 32 bits count."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_harness import run_ranks
from gpu_tensors import DEVICE, all_inputs, check_equal, check_reduced, make_input, on_cpu, on_gpu, output
from harness import Cases

RANKS = [1, 2, 4]


def _offsets(rank: int, n: int) -> None:
    """Views that begin anywhere: no alignment beyond the element's."""
    cases = Cases()
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        for offset in (1, 2, 3, 5):
            for count in (1, 15, 16, 17, 4099):
                with cases(f"{dtype} {count} elements at {offset}"):
                    whole = on_gpu(make_input(rank, count + offset + 3, dtype))
                    before = on_cpu(whole)
                    view = whole[offset : offset + count]
                    dist.all_reduce(view)
                    inputs = [t[offset : offset + count] for t in all_inputs(n, count + offset + 3, dtype)]
                    check_reduced(view, inputs, "SUM")
                    check_equal(whole[:offset], before[:offset])
                    check_equal(whole[offset + count :], before[offset + count :])
    with cases("coalesced"):
        counts = [1, 15, 16, 17, 4099]
        wholes = [on_gpu(make_input(rank, count + 1, torch.float16)) for count in counts]
        with dist.distributed_c10d._coalescing_manager():
            for whole in wholes:
                dist.all_reduce(whole[1:])
        for whole, count in zip(wholes, counts, strict=True):
            check_reduced(whole[1:], [t[1:] for t in all_inputs(n, count + 1, torch.float16)], "SUM")
            check_equal(whole[:1], make_input(rank, count + 1, torch.float16)[:1])
    cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_views_at_any_offset(n: int) -> None:
    run_ranks(_offsets, n)


def _non_contiguous(rank: int, n: int) -> None:
    cases = Cases()
    inputs = [t.reshape(6, 8) for t in all_inputs(n, 48, torch.float32)]
    views = {
        "transposed": lambda t: t.t(),
        "every second column": lambda t: t[:, ::2],
        "a block": lambda t: t[1:4, 2:7],
        "channels last": lambda t: t.reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    }
    for name, view in views.items():
        with cases(f"all_reduce, {name}"):
            mine = view(on_gpu(inputs[rank]))
            dist.all_reduce(mine)
            check_reduced(mine, [view(t).contiguous() for t in inputs], "SUM")
        with cases(f"asynchronous all_reduce, {name}"):
            mine = view(on_gpu(inputs[rank]))
            dist.all_reduce(mine, async_op=True).wait()
            check_reduced(mine, [view(t).contiguous() for t in inputs], "SUM")
        with cases(f"broadcast, {name}"):
            mine = view(on_gpu(inputs[rank]))
            dist.broadcast(mine, n - 1)
            check_equal(mine, view(inputs[n - 1]).contiguous())
        with cases(f"all_gather, {name}"):
            found = [view(on_gpu(torch.zeros(6, 8))) for _ in range(n)]
            dist.all_gather(found, view(on_gpu(inputs[rank])))
            for r in range(n):
                check_equal(found[r], view(inputs[r]).contiguous())
    cases.check()


@pytest.mark.horon_only
@pytest.mark.parametrize("n", [1, 2])
def test_non_contiguous(n: int) -> None:
    run_ranks(_non_contiguous, n)


def _scalars(rank: int, n: int) -> None:
    scalar = on_gpu(torch.tensor(float(rank + 1)))
    dist.all_reduce(scalar)
    assert on_cpu(scalar).item() == n * (n + 1) / 2
    cube = on_gpu(torch.arange(24.0).reshape(2, 3, 4) + rank)
    dist.all_reduce(cube)
    check_equal(cube, n * torch.arange(24.0).reshape(2, 3, 4) + n * (n - 1) / 2)


@pytest.mark.parametrize("n", RANKS)
def test_scalars_and_more_dimensions(n: int) -> None:
    run_ranks(_scalars, n)


def _large(rank: int, n: int) -> None:
    """2.5 GiB as bytes; the ends, and what is around 2 GiB and 4 GiB, are compared."""
    count = (5 << 29) + 3
    mine = torch.full((count,), rank + 1, dtype=torch.uint8, device=DEVICE)
    marks = [0, 1, (1 << 31) - 1, 1 << 31, count - 1]
    for mark in marks:
        mine[mark] = 10 * (rank + 1)
    dist.all_reduce(mine)
    total = n * (n + 1) // 2
    expected = dict.fromkeys(marks, 10 * total)
    for mark in [*marks, 2, (1 << 31) + 1, count - 2]:
        assert mine[mark].item() == expected.get(mark, total), mark
    assert int((mine != total).sum()) == len(marks)
    gathered = torch.empty(n * count, dtype=torch.uint8, device=DEVICE)
    mine.fill_(rank + 1)
    mine[-1] = 100 + rank
    dist.all_gather_into_tensor(gathered, mine)
    for r in range(n):
        part = gathered[r * count : (r + 1) * count]
        assert part[-1].item() == 100 + r
        assert bool((part[:-1] == r + 1).all())
    if rank == 0 and n > 1:
        dist.send(mine, 1)
    elif rank == 1:
        received = output(0, torch.uint8).new_empty(count)
        dist.recv(received, 0)
        assert received[-1].item() == 100 and bool((received[:-1] == 1).all())


@pytest.mark.slow
@pytest.mark.needs_kernels
@pytest.mark.parametrize("n", [1, 2])
def test_more_than_2_gib(n: int) -> None:
    run_ranks(_large, n, timeout=240, group_timeout_s=200)
