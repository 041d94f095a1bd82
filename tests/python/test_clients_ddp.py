"""DistributedDataParallel: gradients equal those of one process with the whole batch; variants; communication hooks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH = 4, 12


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    ).double()


def _plain_model() -> nn.Module:
    """Without batch norm, whose statistics are local to a rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def _batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 20, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (BATCH,), generator=generator)
    size = BATCH // parts
    return x[part * size : (part + 1) * size], y[part * size : (part + 1) * size]


def _train(model: nn.Module, part: int, parts: int, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = _batch(step, part, parts)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _close(actual: list[torch.Tensor], expected: list[torch.Tensor], rtol: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol, msg=lambda text, i=index: f"parameter {i}: {text}")


def _same_on_all_ranks(parameters: list[torch.Tensor], world_size: int) -> None:
    flat = torch.cat([p.reshape(-1) for p in parameters])
    gathered = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(g, gathered[0]) for g in gathered), "the ranks' parameters differ"


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.005},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "both": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    "unused": {"find_unused_parameters": True},
}


def _ddp(rank: int, world_size: int, name: str) -> None:
    expected = _train(_plain_model(), 0, 1)
    model = _plain_model()
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)  # The constructor must broadcast rank 0's.
    actual = _train(DDP(model, **OPTIONS[name]), rank, world_size)  # type: ignore[arg-type]
    _close(actual, expected)
    _same_on_all_ranks(actual, world_size)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_as_one_process(name: str, world_size: int) -> None:
    run_ranks(_ddp, world_size, name)


def _buffers(rank: int, world_size: int) -> None:
    model = DDP(_model())
    _train(model, rank, world_size)
    for _ in range(2):
        model(_batch(0, rank, world_size)[0])
    statistics = [b.double() for b in model.buffers()]
    model(_batch(0, rank, world_size)[0])  # A forward broadcasts rank 0's buffers first.
    _same_on_all_ranks([p.detach() for p in model.parameters()], world_size)
    assert all(torch.isfinite(s).all() for s in statistics)


def test_buffers_and_batch_norm() -> None:
    run_ranks(_buffers, 2)


def _no_sync(rank: int, world_size: int) -> None:
    reference = _plain_model()
    for step in range(3):
        x, y = _batch(step)
        nn.functional.cross_entropy(reference(x), y).backward()
    model = DDP(_plain_model())
    for step in range(3):
        x, y = _batch(step, rank, world_size)
        if step < 2:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), y).backward()
        else:
            nn.functional.cross_entropy(model(x), y).backward()
    _close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_no_sync() -> None:
    run_ranks(_no_sync, 2)


def _join(rank: int, world_size: int) -> None:
    model = DDP(_plain_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + 3 * rank):  # Every rank has another number of batches.
            x, y = _batch(step, rank, world_size)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    _same_on_all_ranks([p.detach() for p in model.parameters()], world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_with_uneven_inputs(world_size: int) -> None:
    run_ranks(_join, world_size)


def _bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are strings in this file.
    """Under another name: DDP refuses the hook itself, by name, where torch was built without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, 1e-9),
    "fp16": (default_hooks.fp16_compress_hook, 5e-3),
    "bf16": (_bf16, 3e-2),
}


def _hook(rank: int, world_size: int, name: str) -> None:
    expected = _train(_plain_model().float().double(), 0, 1)
    hook, tolerance = HOOKS[name]
    for bucket_mb in (25, 0.005):
        model = DDP(_plain_model(), bucket_cap_mb=bucket_mb)
        model.register_comm_hook(None, hook)
        actual = _train(model, rank, world_size)
        _close(actual, expected, tolerance)
        _same_on_all_ranks(actual, world_size)


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hook(name: str) -> None:
    run_ranks(_hook, 2, name)


def _power_sgd(rank: int, world_size: int) -> None:
    model = DDP(_plain_model().float(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, warm_start=True)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(30):
        x, y = _batch(step % 3, rank, world_size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    _same_on_all_ranks([p.detach() for p in model.parameters()], world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_power_sgd_with_one_bucket(world_size: int) -> None:
    run_ranks(_power_sgd, world_size)


def _several_models(rank: int, world_size: int) -> None:
    first, second = DDP(_plain_model()), DDP(_plain_model(), process_group=dist.new_group())
    expected = _train(_plain_model(), 0, 1)
    _close(_train(first, rank, world_size), expected)
    _close(_train(second, rank, world_size), expected)


def test_two_models_in_two_groups() -> None:
    run_ranks(_several_models, 2)


def _unused_on_some_ranks(rank: int, world_size: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.used, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.used(x) + (self.sometimes(x) if both else 0)

    model = DDP(Branches(), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 4), both=(step + rank) % 2 == 0).sum().backward()
        gradient = model.module.sometimes.bias.grad
        assert gradient is not None and torch.equal(gradient, torch.full((4,), 1.0)), (
            "half of 2, from the rank that used it"
        )


def test_parameters_unused_on_some_ranks() -> None:
    run_ranks(_unused_on_some_ranks, 2)
