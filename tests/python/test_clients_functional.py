"""Functional collectives, plain and coalesced, and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import Cases, on_gloo, run_ranks
from reference import SIZES, all_inputs, check_equal, check_reduced, make_input


def _functional(rank: int, world_size: int) -> None:
    cases = Cases()
    group = dist.group.WORLD
    for count in SIZES[1:]:
        inputs = all_inputs(world_size, count, torch.float32)
        mine = make_input(rank, count, torch.float32)
        for op in ("sum", "avg", "max"):
            with cases(f"all_reduce {op} n={count}"):
                check_reduced(_wait(funcol.all_reduce(mine, op, group)), inputs, op.upper())
                check_equal(mine, inputs[rank])
        with cases(f"all_gather_tensor n={count}"):
            check_equal(_wait(funcol.all_gather_tensor(mine, 0, group)), torch.cat(inputs))
        with cases(f"all_gather_tensor along dimension 1 n={count}"):
            gathered = _wait(funcol.all_gather_tensor(mine.reshape(1, -1), 1, group))
            check_equal(gathered, torch.cat(inputs).reshape(1, -1))
        with cases(f"reduce_scatter_tensor n={count}"):
            scattered = _wait(funcol.reduce_scatter_tensor(mine.repeat(world_size), "sum", 0, group))
            check_reduced(scattered, inputs, "SUM")
        with cases(f"all_to_all_single n={count}"):
            received = _wait(funcol.all_to_all_single(mine.repeat(world_size), None, None, group))
            check_equal(received, torch.cat(inputs))
        with cases(f"broadcast n={count}"):
            check_equal(_wait(funcol.broadcast(mine, world_size - 1, group)), inputs[-1])
    cases.check()


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return funcol.wait_tensor(tensor)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_functional(world_size: int) -> None:
    run_ranks(_functional, world_size)


def _splits(rank: int, world_size: int) -> None:
    sends = [rank + target for target in range(world_size)]
    receives = [source + rank for source in range(world_size)]
    data = torch.cat([torch.full((n,), 10.0 * rank + t) for t, n in enumerate(sends)])
    received = _wait(funcol.all_to_all_single(data, receives, sends, dist.group.WORLD))
    check_equal(received, torch.cat([torch.full((n,), 10.0 * s + rank) for s, n in enumerate(receives)]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_all_to_all(world_size: int) -> None:
    run_ranks(_splits, world_size)


def _coalesced(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    counts = [1, 1000, 70001]
    mine = [make_input(rank, n, torch.float32) for n in counts]
    for result, n in zip(funcol.all_reduce_coalesced(mine, "sum", group), counts, strict=True):
        check_reduced(_wait(result), all_inputs(world_size, n, torch.float32), "SUM")
    for result, n in zip(funcol.all_gather_into_tensor_coalesced(mine, group), counts, strict=True):
        check_equal(_wait(result), torch.cat(all_inputs(world_size, n, torch.float32)))
    repeated = [t.repeat(world_size) for t in mine]
    scattered = funcol.reduce_scatter_tensor_coalesced(repeated, "sum", [0] * len(counts), group)
    for result, n in zip(scattered, counts, strict=True):
        check_reduced(_wait(result), all_inputs(world_size, n, torch.float32), "SUM")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalesced(world_size: int) -> None:
    run_ranks(_coalesced, world_size)


def _autograd(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    x = torch.full((4,), float(rank), requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(x, 0, group)
    weights = torch.arange(4.0 * world_size)
    (gathered * weights).sum().backward()
    assert x.grad is not None
    check_equal(x.grad, weights.reshape(world_size, 4)[rank] * world_size)
    y = torch.arange(4.0 * world_size, requires_grad=True)
    funcol.all_to_all_single_autograd(y, None, None, group).square().sum().backward()
    assert y.grad is not None
    check_equal(y.grad, 2 * y.detach())


def test_gradients() -> None:
    run_ranks(_autograd, 2)


def _unwaited(rank: int, world_size: int) -> None:
    results = [funcol.all_reduce(torch.full((10,), float(rank + i)), "sum", dist.group.WORLD) for i in range(50)]
    for index, result in reversed(list(enumerate(results))):
        expected = sum(range(world_size)) + world_size * index
        assert (result + 0 == expected).all(), "an operator on an AsyncCollectiveTensor waits by itself"
    assert on_gloo() or dist.get_rank() == rank


def test_results_wait_when_used() -> None:
    run_ranks(_unwaited, 2)
