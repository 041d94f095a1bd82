"""ZeroRedundancyOptimizer: the sharded optimizer steps like the plain one, and consolidates its state."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def _model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def _zero(rank: int, world_size: int, as_bucket_view: bool) -> None:
    reference, model = _model(), DDP(_model())
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_bucket_view, lr=0.01
    )
    for step in range(5):
        x = torch.randn(12, 10, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        reference(x).square().mean().backward()
        plain.step()
        sharded.zero_grad()
        model(x.chunk(world_size)[rank]).square().mean().backward()
        sharded.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        state = sharded.state_dict()
        expected = plain.state_dict()
        assert len(state["state"]) == len(expected["state"])
        for index, values in expected["state"].items():
            torch.testing.assert_close(state["state"][index]["exp_avg"], values["exp_avg"], rtol=1e-2, atol=1e-5)
    dist.barrier()


@pytest.mark.parametrize("as_bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_like_the_plain_optimizer(world_size: int, as_bucket_view: bool) -> None:
    run_ranks(_zero, world_size, as_bucket_view)
