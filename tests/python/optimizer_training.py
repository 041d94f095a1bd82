"""A small model, the same training in one process on the batches of all ranks, and what compares the two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from horovod_session import horovod
from torch import nn


def make_model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    # Small gradients that go together, and one of 360 KB that goes by itself.
    return nn.Sequential(
        nn.Linear(20, 300, bias), nn.Tanh(), nn.Linear(300, 300, bias), nn.Tanh(), nn.Linear(300, 3, bias)
    )


def make_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(make_batch(step, rank)).square().mean()


def reference_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[int], size: int, scale: float
) -> None:
    """The gradients of all ranks' batches, added up in this process."""
    optimizer.zero_grad()
    for step in steps:
        for rank in range(size):
            (loss_of(model, step, rank) * scale).backward()


def check_same_everywhere(hvd: Any, model: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(everyones[0], one) for one in everyones), "ranks have different parameters"


def follow_reference(
    rank: int,
    size: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    arguments: Callable[[Any, nn.Module], dict[str, Any]],
    set_to_none: bool = True,
    passes: int = 1,
    use_synchronize: bool = False,
    tolerance: float = 1e-5,
    scale: float | None = None,
    bias: bool = True,
) -> None:
    with horovod() as hvd:
        model = make_model(bias)
        plain_model = copy.deepcopy(model)
        plain = make(plain_model)
        optimizer = hvd.DistributedOptimizer(make(model), **arguments(hvd, model))
        assert isinstance(optimizer, type(plain)) and isinstance(optimizer, torch.optim.Optimizer)
        assert type(optimizer).__name__ == type(plain).__name__
        for step in range(4):
            steps = [10 * step + p for p in range(passes)]
            reference_step(plain_model, plain, steps, size, 1 / size if scale is None else scale)
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert all(p.grad is None for p in model.parameters())
            else:
                assert step == 0 or not any(p.grad.any() for p in model.parameters())
            for number in steps:
                loss_of(model, number, rank).backward()
            if use_synchronize:
                optimizer.synchronize()
                for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                nn.utils.clip_grad_norm_(plain_model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            plain.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)
        check_same_everywhere(hvd, model)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def named(hvd: Any, model: nn.Module, **more: Any) -> dict[str, Any]:
    return {"named_parameters": model.named_parameters(), **more}
