"""torch.ops.horon and the bound function beside c10d: the same results, clear errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks, store


def all_reduces(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    ways = (
        lambda tensor, op: torch.ops.horon.all_reduce_(tensor, op, name),
        lambda tensor, op: backend.all_reduce_(tensor, op),
    )
    ops = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}
    for way in ways:
        for shape in [(), (0,), (1,), (7, 3), (5000,), (300_001,)]:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for op, c10d_name in ops.items():
                    tensor = (torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) % 7 + rank).to(dtype)
                    expected = tensor.clone()
                    dist.all_reduce(expected, op=getattr(dist.ReduceOp, c10d_name))
                    way(tensor, op)
                    assert torch.equal(tensor, expected), (shape, dtype, op)
        transposed = torch.full((4, 6), float(rank)).t()
        way(transposed, "sum")
        assert torch.equal(transposed, torch.full((6, 4), float(sum(range(world_size)))))


def errors(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="got 'mean'"):
        torch.ops.horon.all_reduce_(tensor, "mean", name)
    with pytest.raises(RuntimeError):
        torch.ops.horon.all_reduce_(tensor, "sum", "no such group")
    with pytest.raises(dist.DistBackendError, match="number of elements"):
        torch.ops.horon.all_reduce_(torch.ones(3 + rank), "sum", name)
    torch.ops.horon.all_reduce_(tensor, "sum", name)
    assert torch.equal(tensor, torch.full((3,), float(world_size)))


def a_name_that_comes_again(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    tensor = torch.ones(3)
    torch.ops.horon.all_reduce_(tensor, "sum", name)
    kept = dist.group.WORLD  # still alive when its name comes again
    again_store = dist.PrefixStore("again", store())
    dist.destroy_process_group()
    dist.init_process_group("horon", store=again_store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not kept
    again = torch.ones(3)
    torch.ops.horon.all_reduce_(again, "sum", dist.group.WORLD.group_name)
    assert torch.equal(again, tensor)


def compiled(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        torch.ops.horon.all_reduce_(y, "sum", name)
        return torch.relu(y)

    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    compiled_layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_layer(x, weight), layer(x, weight))


@pytest.mark.parametrize("body", [all_reduces, errors, compiled, a_name_that_comes_again])
def test_operators(body: Callable[[int, int], None]) -> None:
    run_ranks(body, 2)
