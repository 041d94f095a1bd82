"""DDP's large gradients that are averaged while they are made (`horon.ddp_in_arena`), with and without
`gradient_as_bucket_view=True`, and those that must not be.

Which way is taken is tried out (Note [DDP's gradients in parts] in torch_backend/ddp_parts.h): every second step, at
first.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import horon
import pytest
import torch
import torch.distributed as dist
from after_another import AfterAnother
from ddp_gradients import KIND, of_kind, views_and_own
from harness import on_gloo, run_ranks
from horon import _ddp_in_arena
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

WIDTH = 1024  # a square of it has 4 MiB
STEPS = 12  # trials begin with the third or fourth


class _Large(nn.Module):
    """Large weights among small ones, and one whose rows do not fill a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [(8, WIDTH), (WIDTH, WIDTH), (WIDTH, 700), (700, 1100), (1100, 3)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def _meeting_group(size: int) -> Iterator[dist.ProcessGroup]:
    """A group whose ranks meet: there is one core for each, but no second one."""
    cores = os.sched_getaffinity(0)
    if len(cores) < size:
        pytest.skip("more ranks than cores do not meet")
    os.sched_setaffinity(0, sorted(cores)[:size])
    group = dist.new_group()
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _option(value: str) -> Iterator[None]:
    """Read when a model's first bucket comes."""
    before = os.environ.get("HORON_REDUCE_WHILE_MADE")
    os.environ["HORON_REDUCE_WHILE_MADE"] = value
    try:
        yield
    finally:
        del os.environ["HORON_REDUCE_WHILE_MADE"]
        if before is not None:
            os.environ["HORON_REDUCE_WHILE_MADE"] = before


def _wrap(base: nn.Module, group: dist.ProcessGroup, in_arena: bool, **options: Any) -> DDP:
    options["gradient_as_bucket_view"] = KIND.are_views
    model = DDP(copy.deepcopy(base), process_group=group, **options)
    return horon.ddp_in_arena(model) if in_arena else model


def _n_made(model: DDP) -> int:
    passes = _ddp_in_arena._passes_of(model)
    assert passes is not None and passes.parts is not None
    return passes.parts.n_made


def _input(step: int, rank: int, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


def _check(ours: nn.Module, theirs: nn.Module, group: dist.ProcessGroup, what: str, exact: bool = False) -> None:
    """Gradients as those of the other model, and the same bits on all ranks."""
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{what}: {name}"
        if a.grad is None or b.grad is None:
            continue
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(a.grad, b.grad, **tolerance, msg=lambda text, n=name: f"{what}: {n}: {text}")
        least, most = a.grad.clone(), a.grad.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        assert torch.equal(least, most), f"{what}: {name} differs between ranks"


def _same_bits(rank: int, world_size: int, batch: int, bucket_cap_mb: float) -> None:
    with _meeting_group(world_size) as group:
        base = _Large()
        plain = _wrap(base, group, False, bucket_cap_mb=bucket_cap_mb)
        with _option("off"):
            whole = _wrap(base, group, True, bucket_cap_mb=bucket_cap_mb)
            _step(whole, _input(0, rank, batch))
        parts = _wrap(base, group, True, bucket_cap_mb=bucket_cap_mb)
        for step in range(2 * STEPS):
            for model in (plain, whole, parts):
                _step(model, _input(step, rank, batch))
            _check(parts, plain, group, f"step {step}")
            _check(parts, whole, group, f"step {step}", exact=True)
        assert _n_made(parts) >= 5
        assert _n_made(whole) == 0


def _off_on_one_rank(rank: int, world_size: int) -> None:
    with _meeting_group(world_size) as group, _option("off" if rank == 1 else "on"):
        base = _Large()
        plain, model = _wrap(base, group, False), _wrap(base, group, True)
        for step in range(STEPS):
            for each in (plain, model):
                _step(each, _input(step, rank))
            _check(model, plain, group, f"step {step}")
        assert _n_made(model) == 0


class _Alternating(nn.Module):
    """Uses one of two large layers in each step, not the same one on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.either, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        middle = (self.either, self.other)[(self.turn // 2) % 2]
        result: torch.Tensor = self.last(torch.tanh(middle(self.first(x))))
        return result


def _unused_on_some_ranks(rank: int, world_size: int) -> None:
    with _meeting_group(world_size) as group:
        models = [_wrap(_Alternating(), group, arena, find_unused_parameters=True) for arena in (False, True)]
        for model in models:
            model.module.turn = rank
        for step in range(2 * STEPS):
            for model in models:
                _step(model, _input(step, rank))
            _check(models[1], models[0], group, f"step {step}")
        assert _n_made(models[1]) > 0


def _joined(rank: int, world_size: int) -> None:
    """Ranks with fewer inputs take part with zeros; then all go on."""
    with _meeting_group(world_size) as group:
        models = [_wrap(_Large(), group, arena) for arena in (False, True)]
        for turn in range(2):
            n_steps = STEPS + 3 * (rank if turn == 0 else world_size - 1 - rank)
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                with model.join():
                    for step in range(n_steps):
                        optimizer.zero_grad()
                        model(_input(100 * turn + step, rank)).square().sum().backward()
                        optimizer.step()
            for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
                torch.testing.assert_close(a, b)
        assert _n_made(models[1]) > 0


def _accumulated(rank: int, world_size: int) -> None:
    with _meeting_group(world_size) as group:
        models = [_wrap(_Large(), group, arena) for arena in (False, True)]
        for step in range(STEPS):
            for model in models:
                model.zero_grad(set_to_none=step % 3 != 0)
                if step % 4 == 3:
                    with model.no_sync():
                        model(_input(step + 50, rank)).square().sum().backward()
                model(_input(step, rank)).square().sum().backward()
            _check(models[1], models[0], group, f"step {step}")
        assert _n_made(models[1]) > 0


def _hooks_of_the_user(rank: int, world_size: int) -> None:
    """Whoever looks at a gradient before it is stored sees the rank's own; after that, who knows."""
    with _meeting_group(world_size) as group:
        models = [_wrap(_Large(), group, arena) for arena in (False, True)]
        kept: list[list[torch.Tensor]] = [[], []]
        for model, seen in zip(models, kept, strict=True):
            model.module.layers[1].weight.register_hook(lambda gradient: gradient * 3)
            model.module.layers[2].weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        for step in range(STEPS):
            for model in models:
                _step(model, _input(step, rank))
            _check(models[1], models[0], group, f"step {step}")
        for a, b in zip(kept[1], kept[0], strict=True):
            torch.testing.assert_close(a, b)
        for model in models:  # in the middle of it
            model.module.layers[3].weight.register_hook(lambda gradient: gradient * 2)
        for step in range(4):
            for model in models:
                _step(model, _input(step, rank))
            _check(models[1], models[0], group, f"later step {step}")


class _Meets(torch.autograd.Function):
    """Sums up over the ranks in the backward pass, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = gradients[0].sum(dim=0)
        dist.all_reduce(summed, group=ctx.group)
        return gradients[0] + summed, None


class _MeetsBetween(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = _Meets.apply(torch.tanh(layer(x)), self.group)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.last(x)
        return result


def _others_in_between(rank: int, world_size: int) -> None:
    """Other operations of the group in the backward pass, where ranks differ in what they make in parts."""
    with _meeting_group(world_size) as group:
        models = []
        for in_arena in (False, True):
            base = _MeetsBetween(group)
            model = DDP(base, process_group=group, gradient_as_bucket_view=KIND.are_views)
            models.append(horon.ddp_in_arena(model) if in_arena else model)
            if rank == 0:
                base.middle[1].weight.register_hook(lambda gradient: gradient * 2)
        for step in range(2 * STEPS):
            for model in models:
                _step(model, _input(step, rank, 4 + (rank if step % 5 == 4 else 0)))
            _check(models[1], models[0], group, f"step {step}")
        assert _n_made(models[1]) > 0


class _InOneAnother(nn.Module):
    """A weight that is used in two backward passes within one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.twice, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.twice, x, use_reentrant=True))
        result: torch.Tensor = self.last(x)
        return result


def _passes_within_one(rank: int, world_size: int) -> None:
    with _meeting_group(world_size) as group:
        models = [_wrap(_InOneAnother(), group, arena, static_graph=True) for arena in (False, True)]
        for step in range(2 * STEPS):
            for model in models:
                _step(model, _input(step, rank))
            _check(models[1], models[0], group, f"step {step}")


class _TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.after_another = False
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(1, WIDTH // 8)
        product: Any = AfterAnother.apply if self.after_another else torch.matmul
        result: torch.Tensor = product(x, self.a) + 2 * (x @ self.b)[:, 1:]
        return result


def _moved_meanwhile(rank: int, world_size: int) -> None:
    """The bucket gets other memory after one of its gradients was averaged and before it goes out."""
    with _meeting_group(world_size) as group:
        models = [_wrap(_TwoProducts(), group, arena) for arena in (False, True)]
        for step in range(2 * STEPS):
            AfterAnother.kept.clear()
            for model in models:
                model.module.after_another = step >= 7  # where every second one is made in parts
                _step(model, _input(step, rank))
            _check(models[1], models[0], group, f"step {step}")
            assert all((kept == 7).all() for kept in AfterAnother.kept), f"step {step}"
        assert _n_made(models[1]) > 0


BODIES = [
    _off_on_one_rank,
    _unused_on_some_ranks,
    _joined,
    _accumulated,
    _hooks_of_the_user,
    _others_in_between,
    _passes_within_one,
    _moved_meanwhile,
]


@views_and_own
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_ddp_in_parts(body: Callable[[int, int], None], are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, body)


@views_and_own
@pytest.mark.parametrize("bucket_cap_mb", [0.3, 25])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_same_bits(batch: int, bucket_cap_mb: float, are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, _same_bits, batch, bucket_cap_mb)
