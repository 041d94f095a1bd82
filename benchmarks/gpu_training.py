"""A training step of a ResNet-50: DDP on horon and on nccl, hvd.DistributedOptimizer, and no communication at all."""

from __future__ import annotations

from typing import Any

import gpu_ranks
import gpu_timing
import torch
import torch.distributed as dist
from gpu_timing import Cell, Contender
from gpu_workloads import resnet50
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kBatches = (32, 128)  # images. With 32 an H200 waits for the host, with 128 the host for it.
kImage = 224


def measure(rank: int, n_ranks: int, rounds: int, batch: int) -> list[Cell]:
    """Runs on every rank; rank 0's result counts."""
    import horon.torch as hvd

    hvd.init()
    groups = gpu_ranks.new_groups()
    x = torch.randn(batch, 3, kImage, kImage, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device="cuda")
    contenders = [_contender("no communication", resnet50(), x, y, None)]
    for backend, group in groups.items():
        for view in (False, True):
            name = f"DDP on {backend}" + (", gradient_as_bucket_view" if view else "")
            contenders.append(_contender(name, resnet50(), x, y, None, group=group, view=view))
    contenders.append(_contender("hvd.DistributedOptimizer", resnet50(), x, y, hvd))
    samples = gpu_timing.take_turns(contenders, rounds)
    cells = gpu_timing.cells(table_of(batch), contenders, samples, keep_totals=True)
    hvd.shutdown()
    return cells


def table_of(batch: int) -> str:
    return f"step of a ResNet-50, {batch} images"


def _contender(
    name: str,
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    hvd: Any,
    *,
    group: dist.ProcessGroup | None = None,
    view: bool = False,
) -> Contender:
    model = model.to("cuda", memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    if group is not None:
        model = DistributedDataParallel(model, device_ids=[0], process_group=group, gradient_as_bucket_view=view)
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    def check() -> None:
        if group is not None or hvd is not None:
            _same_on_all_ranks(name, parameters)

    return Contender(name, step, check=check, n_bytes=4 * sum(p.numel() for p in parameters))


def _same_on_all_ranks(name: str, parameters: list[nn.Parameter]) -> None:
    sums = torch.stack([parameter.detach().double().sum() for parameter in parameters]).cpu()
    theirs = sums.clone()
    dist.broadcast(theirs, 0)
    if not torch.equal(sums, theirs):
        raise AssertionError(f"{name}: rank {dist.get_rank()} has other parameters than rank 0")
