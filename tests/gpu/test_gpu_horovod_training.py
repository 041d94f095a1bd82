"""hvd.DistributedOptimizer and the broadcasts around it, for models on the GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_harness import run_ranks
from gpu_tensors import DEVICE, on_cpu
from harness import Cases
from horovod_session import horovod
from torch import nn

pytestmark = [pytest.mark.horon_only, pytest.mark.needs_kernels]

RANKS = [1, 2, 4]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    # Gradients that go together, and one of 10.8 MB that goes by itself.
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 4500), nn.Tanh(), nn.Linear(4500, 3)).double()


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def _loss(model: nn.Module, step: int, rank: int, device: torch.device | str = DEVICE) -> torch.Tensor:
    return model(_batch(step, rank).to(device)).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _reference(size: int, steps: int, passes: int = 1) -> nn.Module:
    """One process on the CPU with all ranks' batches."""
    model = _model()
    optimizer = _sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in range(size):
                (_loss(model, 10 * step + number, rank, "cpu") / size).backward()
        optimizer.step()
    return model


def _close(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            on_cpu(ours), theirs.detach(), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def _same_everywhere(hvd: Any, model: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = on_cpu(hvd.allgather(flat.unsqueeze(0)))
    assert all(torch.equal(everyones[0], one) for one in everyones), "ranks have different parameters"


def _training(rank: int, size: int) -> None:
    cases = Cases()
    with horovod() as hvd:
        variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "plain": ({}, {}),
            "gradients stay": ({}, {"set_to_none": False}),
            "two passes": ({"backward_passes_per_step": 2}, {"passes": 2}),
            "grouped": ({"num_groups": 2}, {}),
            "fp16": ({"compression": hvd.Compression.fp16}, {"tolerance": 5e-3}),
            "bf16": ({"compression": hvd.Compression.bf16}, {"tolerance": 3e-2}),
            "predivided": ({"gradient_predivide_factor": 2.0}, {}),
            "synchronized by hand": ({}, {"by_hand": True}),
        }
        for name, (arguments, how) in variants.items():
            with cases(name):
                _train_one(hvd, rank, size, arguments, **how)
        cases.check()


def _train_one(
    hvd: Any,
    rank: int,
    size: int,
    arguments: dict[str, Any],
    set_to_none: bool = True,
    passes: int = 1,
    tolerance: float = 1e-7,
    by_hand: bool = False,
) -> None:
    model = _model().to(DEVICE)
    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters(), **arguments)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            _loss(model, 10 * step + number, rank).backward()
        if by_hand:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    _close(model, _reference(size, 4, passes), tolerance)
    _same_everywhere(hvd, model)


@pytest.mark.parametrize("n", RANKS)
def test_distributed_optimizer(n: int) -> None:
    run_ranks(_training, n)


def _in_two_parts(rank: int, size: int) -> None:
    """A model of which one half is on the CPU."""
    with horovod() as hvd:
        model = _model()
        model[0].to(DEVICE)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return model[1:](model[0](x.to(DEVICE)).cpu()).square().mean()

        optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            forward(_batch(10 * step, rank)).backward()
            optimizer.step()
        _close(model, _reference(size, 4), 1e-7)


@pytest.mark.parametrize("n", [1, 2])
def test_a_model_on_two_devices(n: int) -> None:
    run_ranks(_in_two_parts, n)


def _many_small(rank: int, size: int) -> None:
    """100 layers: gradients of many names, ready in another order than they were named."""
    with horovod() as hvd:
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(100) for m in (nn.Linear(16, 16), nn.Tanh())]).double()
        reference = copy.deepcopy(model)
        model.to(DEVICE)
        optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
        plain = _sgd(reference)
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(7 * step + r)) for r in range(size)]
            model(batches[rank].double().to(DEVICE)).square().mean().backward()
            for batch in batches:
                (reference(batch.double()).square().mean() / size).backward()
            optimizer.step()
            plain.step()
        _close(model, reference, 1e-7)


@pytest.mark.parametrize("n", RANKS)
def test_many_small_gradients(n: int) -> None:
    run_ranks(_many_small, n)


def _broadcasts(rank: int, size: int) -> None:
    with horovod() as hvd:
        root = size - 1
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
        model(torch.randn(4, 8, device=DEVICE)).sum().backward()
        optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        state = {name: on_cpu(tensor) for name, tensor in model.state_dict().items()}
        moments = [on_cpu(s["exp_avg"]) for s in optimizer.state.values()]
        rate = optimizer.param_groups[0]["lr"]
        everyones = hvd.allgather_object((state, moments, rate))
        for theirs, their_moments, their_rate in everyones:
            assert all(torch.equal(state[name], theirs[name]) for name in state)
            assert all(torch.equal(a, b) for a, b in zip(moments, their_moments, strict=True))
            assert their_rate == 0.01 * (root + 1)
        assert all(tensor.is_cuda for tensor in model.state_dict().values())
        assert all(s["exp_avg"].is_cuda for s in optimizer.state.values())


@pytest.mark.parametrize("n", RANKS)
def test_broadcast_of_parameters_and_optimizer_state(n: int) -> None:
    run_ranks(_broadcasts, n)


def _sync_batch_norm(rank: int, size: int) -> None:
    with horovod() as hvd:
        x = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(0)).double()
        ours = hvd.SyncBatchNorm(6).double().to(DEVICE)
        theirs = nn.BatchNorm1d(6).double()
        found = ours(x[4 * rank : 4 * rank + 4].to(DEVICE))
        torch.testing.assert_close(on_cpu(found), theirs(x)[4 * rank : 4 * rank + 4].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(on_cpu(ours.running_mean), theirs.running_mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_sync_batch_norm(n: int) -> None:
    run_ranks(_sync_batch_norm, n)
