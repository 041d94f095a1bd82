"""FSDP2: fully_shard on CPU trains like one process; gradient accumulation; HSDP over a two-dimensional mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import gloo_lacks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3))


def _batch(step: int, part: int, parts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 7, generator=generator).chunk(parts)[part]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)  # type: ignore[arg-type]
    fully_shard(model, **options)  # type: ignore[arg-type]
    return model


def _full(parameter: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def _compare(model: nn.Module, reference: nn.Module, rtol: float = 1e-4) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            _full(ours.data), theirs.data, rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )


def _trains(rank: int, world_size: int, accumulate: bool) -> None:
    model, reference = _shard(_model()), _model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2 if accumulate else 1):
            last = not accumulate or micro == 1
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            _loss(model, _batch(10 * step + micro, rank, world_size)).backward()
            _loss(reference, _batch(10 * step + micro, 0, 1)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(_full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    _compare(model, reference)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_like_one_process(world_size: int, accumulate: bool) -> None:
    run_ranks(_trains, world_size, accumulate)


def _uneven(rank: int, world_size: int) -> None:
    # 33 rows over 4 ranks: shards of different sizes, padded; a weight of 3 rows leaves one rank with nothing.
    model, reference = _shard(_model()), _model()
    _loss(model, _batch(0, rank, world_size)).backward()
    _loss(reference, _batch(0, 0, 1)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)


def test_uneven_shards() -> None:
    run_ranks(_uneven, 4)


def _mixed_precision(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = _shard(_model(), mp_policy=policy), _model()
    for _ in range(2):
        _loss(model, _batch(0, rank, world_size)).backward()
        _loss(reference, _batch(0, 0, 1)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_full(ours.grad), theirs.grad, rtol=0.1, atol=5e-3)


def test_mixed_precision() -> None:
    run_ranks(_mixed_precision, 2)


def _hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = _shard(_model(), mesh=mesh), _model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(model, _batch(step, rank, world_size)).backward()
        _loss(reference, _batch(step, 0, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
    _compare(model, reference)


def test_hybrid_sharding() -> None:
    run_ranks(_hybrid, 4)


def _custom_factor(rank: int, world_size: int) -> None:
    model, reference = _shard(_model()), _model()
    model.set_gradient_divide_factor(float(3 * world_size))  # type: ignore[operator]
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.set_gradient_divide_factor(float(3 * world_size))  # type: ignore[operator]
    _loss(model, _batch(0, rank, world_size)).backward()
    _loss(reference, _batch(0, 0, 1)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_full(ours.grad), theirs.grad / 3, rtol=1e-4, atol=1e-6)
    dist.barrier()


def test_custom_divide_factor_uses_premul_sum() -> None:
    gloo_lacks("no PREMUL_SUM")
    run_ranks(_custom_factor, 2)
