"""Gradients that torch's kernels make right in DistributedOptimizer's buckets.

The rules, and what else may lie there: tests/python/test_gradients_in_place.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_harness import run_ranks
from gpu_tensors import DEVICE
from harness import Cases
from horovod_session import horovod
from torch import nn

pytestmark = [pytest.mark.horon_only, pytest.mark.needs_kernels]

STEPS = 6
LEARNED = 2
Batch = tuple[torch.Tensor, torch.Tensor]


def _images(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)


def _words(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(100, (4, 16), generator=generator), torch.randint(10, (4,), generator=generator)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.GroupNorm(4, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.places = nn.Parameter(torch.randn(16, 64))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(self.layers(self.words(x) + self.places)).mean(1))
        return result


def _note(made_at: dict[str, int], name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    made_at[name] = parameter.grad.data_ptr()


def _loss(model: nn.Module, batch: Batch, how: dict[str, bool]) -> torch.Tensor:
    x, y = (tensor.to(DEVICE) for tensor in batch)
    if how.get("channels_last"):
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16, enabled=how.get("amp", False)):
        return nn.functional.cross_entropy(model(x), y)


def _kernels(body: Callable[[], None]) -> list[str]:
    """The names of the kernels that it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]


def _train(rank: int, size: int, hvd: Any, model: nn.Module, batch: Callable[[int, int], Batch], **how: bool) -> None:
    """Compares with the same model whose gradients are averaged by hand."""
    model.to(DEVICE)
    if how.get("channels_last"):
        model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    made_at: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(_note, made_at, name))  # type: ignore[no-untyped-call]
    forward = torch.compile(model) if how.get("compiled") else model

    def step_of(step: int) -> None:
        optimizer.zero_grad()
        _loss(forward, batch(rank, step), how).backward()
        optimizer.synchronize()

    for step in range(STEPS):
        if step == STEPS - 1:
            names = _kernels(functools.partial(step_of, step))
            assert names
            assert not [name for name in names if "pack_kernel" in name], "gradients were packed"
        else:
            step_of(step)
        if step >= LEARNED:
            elsewhere = [n for n, p in model.named_parameters() if p.grad is None or p.grad.data_ptr() != made_at[n]]
            assert not elsewhere, f"step {step}: made elsewhere: {elsewhere}"
        reference.zero_grad()
        _loss(plain, batch(rank, step), how).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            theirs.grad = hvd.allreduce(theirs.grad, name=f"by hand {name}")
            tolerance = 3e-2 if how.get("amp") or how.get("compiled") else 1e-4
            torch.testing.assert_close(
                ours.grad,
                theirs.grad,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, n=name, s=step: f"{s}, {n}: {text}",
            )
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.load_state_dict(model.state_dict())


def _models(rank: int, size: int) -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cases = Cases()
    with horovod() as hvd:
        for name, make, batch, how in [
            ("convolutions", _convolutions, _images, {}),
            ("convolutions, channels last", _convolutions, _images, {"channels_last": True}),
            ("convolutions, bfloat16", _convolutions, _images, {"amp": True}),
            ("convolutions, channels last, bfloat16", _convolutions, _images, {"amp": True, "channels_last": True}),
            ("transformer", _Transformer, _words, {}),
            ("transformer, bfloat16", _Transformer, _words, {"amp": True}),
        ]:
            with cases(name):
                torch.manual_seed(1)
                _train(rank, size, hvd, make(), batch, **how)
        cases.check()


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_packed(n: int) -> None:
    run_ranks(_models, n)


def _compiled(rank: int, size: int) -> None:
    with horovod() as hvd:
        torch.manual_seed(1)
        _train(rank, size, hvd, _Transformer(), _words, compiled=True)


def test_compiled() -> None:
    run_ranks(_compiled, 1, timeout=180)


def _pools_and_graphs(rank: int, size: int) -> None:
    """Who routes allocations into a pool has them there; graphs of other models replay right with the wrapper."""
    with horovod() as hvd:
        model = nn.Linear(500, 300).to(DEVICE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        made_at: dict[str, int] = {}
        model.weight.register_post_accumulate_grad_hook(functools.partial(_note, made_at, "weight"))  # type: ignore[no-untyped-call]
        x = torch.randn(16, 500, device=DEVICE)
        pool = torch.cuda.MemPool()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if step % 2:
                loss.backward()
            else:
                with torch.cuda.use_mem_pool(pool):
                    loss.backward()
            optimizer.synchronize()
            assert model.weight.grad is not None
            is_in_place = model.weight.grad.data_ptr() == made_at["weight"]
            assert is_in_place == bool(step % 2) or step < 2 * LEARNED, step
        other = nn.Linear(500, 300).to(DEVICE)
        static = torch.randn(16, 500, device=DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other(static).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        other.zero_grad()
        with torch.cuda.graph(graph):
            other(static).square().mean().backward()
        for turn in range(3):
            static.copy_(torch.randn(16, 500, generator=torch.Generator().manual_seed(turn)))
            graph.replay()
            captured = [p.grad.clone() for p in other.parameters() if p.grad is not None]
            wanted = torch.autograd.grad(other(static).square().mean(), list(other.parameters()))
            assert len(captured) == 2
            for ours, theirs in zip(captured, wanted, strict=True):
                torch.testing.assert_close(ours, theirs)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        x.clone()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
        assert torch.cuda.memory_snapshot()
        torch.cuda.empty_cache()


def test_pools_and_graphs() -> None:
    run_ranks(_pools_and_graphs, 1)


def _memory(rank: int, size: int) -> None:
    """What lies in its place needs no memory of its own."""
    with horovod() as hvd:
        model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)]).to(DEVICE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        x = torch.randn(16, 1000, device=DEVICE)
        peaks = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            torch.cuda.synchronize()
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - start)
            optimizer.step()
        n_bytes = sum(p.nbytes for p in model.parameters())
        assert peaks[-1] < n_bytes / 4, f"{peaks} bytes above those before backward(); gradients have {n_bytes}"


@pytest.mark.parametrize("n", [1, 2])
def test_memory(n: int) -> None:
    run_ranks(_memory, n)
