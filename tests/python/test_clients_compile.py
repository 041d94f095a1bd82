"""torch.compile with aot_eager: functional collectives and dist.* calls that dynamo traces, DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def _functional(rank: int, world_size: int) -> None:
    group = dist.group.WORLD

    def function(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y + 1, 0, group)
        return funcol.reduce_scatter_tensor(z.sin(), "sum", 0, group)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for count in (8, 1000):
        x = torch.arange(float(count)) + rank
        torch.testing.assert_close(compiled(x), function(x))


def test_functional_collectives() -> None:
    run_ranks(_functional, 2, timeout=120)


def _in_place(rank: int, world_size: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        output = torch.empty(world_size * y.numel())
        dist.all_gather_into_tensor(output, y)
        return output + 1

    compiled = torch.compile(function, backend="aot_eager")
    x = torch.arange(10.0) + rank
    torch.testing.assert_close(compiled(x), function(x))


def test_traced_dist_calls() -> None:
    run_ranks(_in_place, 2, timeout=120)


def _ddp(rank: int, world_size: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))

    model, reference = DDP(build()), build()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        compiled(x.chunk(world_size)[rank]).square().mean().backward()
        reference(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_ddp() -> None:
    run_ranks(_ddp, 2, timeout=120)
