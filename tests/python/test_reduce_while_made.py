"""Gradients that are reduced while the product that makes them is still at it, and those that must not be.

Which way is taken is tried out (Note [Trials] in csrc/named/parts_trial.h): every second time, at first.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import on_gloo, run_fresh_processes, run_ranks
from horovod_session import horovod
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

WIDTH = 1024  # a weight has 4 MiB
STEPS = 8


class _Model(nn.Module):
    """One product with a large parameter, before and after others."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(8, WIDTH, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 32)
        self.after = nn.Linear(WIDTH, 2, dtype=dtype)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.product(self.before(x), self.weight))


@contextlib.contextmanager
def _meeting(size: int) -> Iterator[Any]:
    """Horovod's API where ranks meet: there is one core for each, but no second one."""
    cores = os.sched_getaffinity(0)
    if len(cores) < size:
        pytest.skip("more ranks than cores do not meet")
    os.sched_setaffinity(0, sorted(cores)[:size])
    try:
        with horovod() as hvd:
            yield hvd
    finally:
        os.sched_setaffinity(0, cores)


def _loss(model: nn.Module, step: int, rank: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(batch, 8, generator=generator).to(dtype)).square().mean()


def _n_made(optimizer: Any) -> int:
    buckets = optimizer._horon_reducer._buckets or []
    return sum(bucket.native.n_made for bucket in buckets if bucket.native is not None)


def _gradients(model: nn.Module, *batch: Any) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    if any(parameter._backward_hooks for parameter in parameters):
        return list(torch.autograd.grad(_loss(model, *batch), parameters))
    copy_of_it = copy.deepcopy(model)
    _loss(copy_of_it, *batch).backward()
    return [parameter.grad for parameter in copy_of_it.parameters()]  # type: ignore[misc]


def _train(
    hvd: Any,
    model: nn.Module,
    batch: int = 4,
    dtype: torch.dtype = torch.float32,
    zero_grad: Callable[[Any], None] = lambda optimizer: optimizer.zero_grad(),
    before_step: Callable[[int], None] = lambda step: None,
) -> int:
    """Some steps, each compared with the average of all ranks' gradients. Returns how many were reduced while made."""
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=1e-5)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    for step in range(STEPS):
        everyones = [_gradients(model, step, r, batch, dtype) for r in range(hvd.size())]
        zero_grad(optimizer)
        before_step(step)
        _loss(model, step, hvd.rank(), batch, dtype).backward()
        optimizer.synchronize()
        for parameter, gradients in zip(parameters, zip(*everyones, strict=True), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.stack(gradients).mean(dim=0))
            some = parameter.grad.flatten()[:: 1 + parameter.numel() // 4096].clone()
            everyones_some = hvd.allgather(some.unsqueeze(0))
            assert all(torch.equal(everyones_some[0], one) for one in everyones_some)
        with optimizer.skip_synchronize():
            optimizer.step()
    return _n_made(optimizer)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight, weight.new_zeros(WIDTH))


MADE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": _linear,
    "linear without bias": functional.linear,
    "of three dimensions": lambda x, weight: _linear(x.unsqueeze(0), weight).squeeze(0),
    "mm": lambda x, weight: x @ weight,
    "first factor": lambda x, weight: (weight @ x.t()).t(),
    "of data": lambda x, weight: _linear(torch.ones_like(x), weight) + x,  # whose gradient nobody wants
}


def _makes(rank: int, size: int, name: str, dtype: torch.dtype) -> None:
    with _meeting(size) as hvd:
        # Not in the first step, nor in the one in which the bits are compared; then in every second one.
        assert _train(hvd, _Model(MADE[name], dtype), dtype=dtype) in (STEPS // 2 - 1, STEPS // 2)


@pytest.mark.parametrize("name", list(MADE))
def test_made(name: str) -> None:
    run_ranks(_makes, 2, name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    run_ranks(_makes, 2, "linear", dtype)


def _shares_transpose(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    transposed = weight.t()
    return x @ transposed + (x * 2) @ transposed


def _shares_transpose_of_data(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    transposed = weight.t()
    return x + torch.ones_like(x) @ transposed + torch.full_like(x, 2) @ transposed


class _Node(torch.autograd.Function):
    """Looks at the gradient on its way."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.clamp(-1e-4, 1e-4)


def _transpose_with_hook(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    transposed = weight.t()
    if transposed.requires_grad:
        transposed.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return x @ transposed


NOT_MADE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "used twice": lambda x, weight: _linear(_linear(x, weight), weight),
    "with a penalty": lambda x, weight: _linear(x, weight) + weight.square().mean(),
    "transpose used twice": _shares_transpose,
    "transpose used twice, of data": _shares_transpose_of_data,
    "alpha": lambda x, weight: torch.addmm(x, x, weight, alpha=2),
    "a node between": lambda x, weight: _linear(x, _Node.apply(weight)),
    "a hook of the transpose": _transpose_with_hook,
    "by itself": lambda x, weight: x @ (weight @ weight),
    "scaled": lambda x, weight: _linear(x, weight * 2),
    "checkpoint": lambda x, weight: checkpoint(_linear, x, weight, use_reentrant=True),
    "under saved-tensor hooks, twice": lambda x, weight: checkpoint(_shares_transpose, x, weight, use_reentrant=False),
}


def _does_not_make(rank: int, size: int, name: str) -> None:
    with _meeting(size) as hvd:
        assert _train(hvd, _Model(NOT_MADE[name], torch.float32)) == 0


@pytest.mark.parametrize("name", list(NOT_MADE))
def test_not_made(name: str) -> None:
    run_ranks(_does_not_make, 2, name)


def _hooks_of_parameters(rank: int, size: int) -> None:
    with _meeting(size) as hvd:
        seen: list[torch.Tensor] = []
        model = _Model(_linear, torch.float32)
        hook = model.weight.register_hook(lambda gradient: gradient.clamp(-1e-5, 1e-5))
        assert _train(hvd, model) == 0
        hook.remove()

        def look(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())

        model = _Model(_linear, torch.float32)
        hook = model.weight.register_post_accumulate_grad_hook(look)
        assert _train(hvd, model) == 0
        own = torch.autograd.grad(_loss(model, 0, rank, 4, torch.float32), [model.weight])
        assert len(seen) == STEPS and not torch.equal(seen[-1], own[0])
        hook.remove()


def test_hooks_of_parameters() -> None:
    run_ranks(_hooks_of_parameters, 2)


def _ways_to_train(rank: int, size: int) -> None:
    with _meeting(size) as hvd:
        n_made = _train(
            hvd, _Model(_linear, torch.float32), zero_grad=lambda optimizer: optimizer.zero_grad(set_to_none=False)
        )
        assert n_made == 0  # it is added to the one that is there
        # The gradients of both factors have the same shape.
        assert _train(hvd, _Model(_linear, torch.float32), batch=WIDTH) == 0
        # Nobody meets.
        late = _train(
            hvd,
            _Model(_linear, torch.float32),
            before_step=lambda step: time.sleep(0.02) if rank == step % size else None,
        )
        assert late > 0
        # A rank on its own way.
        model = _Model(_linear, torch.float32)
        if rank == 1:
            model.weight.register_hook(lambda gradient: None)
        assert (_train(hvd, model) > 0) == (rank == 0)


def test_ways_to_train() -> None:
    run_ranks(_ways_to_train, 2)


class _Ambiguous(nn.Module):
    """The gradients of both factors of W.t() @ h are products of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(8, 512)
        self.weight = nn.Parameter(torch.randn(2048, 512) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.t() @ self.before(x)


def _unequal_bits(rank: int, size: int) -> None:
    """Rows that are made by themselves must have the bits that they have among others: see what this machine does."""
    with _meeting(size) as hvd:
        assert _train(hvd, _Ambiguous(), batch=2048) == 0
        for batch in (64, 1000):
            torch.manual_seed(7)
            gradient, x = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
            whole = gradient.t() @ x
            parts = torch.cat([gradient.t()[i : i + 64] @ x for i in range(0, WIDTH, 64)])
            n_made = _train(hvd, _Model(_linear, torch.float32), batch=batch)
            assert (n_made > 0) == torch.equal(whole, parts)


def test_what_is_not_made_in_parts() -> None:
    run_ranks(_unequal_bits, 2)


def _interrupted(rank: int, size: int) -> None:
    """A backward pass that ends early, after a gradient has gone out."""

    def fails(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    with _meeting(size) as hvd:
        model = _Model(_linear, torch.float32)
        assert _train(hvd, model) > 0
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            hook = model.before.weight.register_hook(fails)
            with pytest.raises(ZeroDivisionError):
                _loss(model, step, rank, 4, torch.float32).backward()
            hook.remove()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.synchronize()
        assert _n_made(optimizer) > 0
        del optimizer
        gc.collect()  # somebody else who holds the parameters' nodes is a reason not to
    with _meeting(size) as hvd:  # which tries again what is faster
        assert _train(hvd, model) > 0


def test_backward_that_ends_early() -> None:
    run_ranks(_interrupted, 2)


def _accumulates(rank: int, size: int) -> None:
    with _meeting(size) as hvd:
        model = _Model(_linear, torch.float32)
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1e-5), model.named_parameters(), backward_passes_per_step=2
        )
        for step in range(STEPS):
            losses = [[_loss(model, 2 * step + i, r, 4, torch.float32) for i in range(2)] for r in range(size)]
            sums = [torch.autograd.grad(a + b, parameters) for a, b in losses]
            optimizer.zero_grad()
            for i in range(2):
                _loss(model, 2 * step + i, rank, 4, torch.float32).backward()
            optimizer.synchronize()
            for parameter, gradients in zip(parameters, zip(*sums, strict=True), strict=True):
                torch.testing.assert_close(parameter.grad, torch.stack(gradients).mean(dim=0))
            with optimizer.skip_synchronize():
                optimizer.step()
        assert _n_made(optimizer) == 0


def test_several_backward_passes() -> None:
    run_ranks(_accumulates, 2)


class _Copies(TorchDispatchMode):
    """What a program might put between a product and whoever has asked for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.clone() if function is torch.ops.aten.mm.default else result


def _becomes_something_else(rank: int, size: int) -> None:
    words = r"has become something else.*HORON_REDUCE_WHILE_MADE=off"
    with _meeting(size) as hvd:
        model = _Model(_linear, torch.float32)
        with pytest.raises(RuntimeError, match=words), _Copies():
            _train(hvd, model)
        hvd.barrier()  # the job goes on
        assert _train(hvd, model) > 0


def test_error_where_it_becomes_something_else() -> None:
    run_ranks(_becomes_something_else, 2)


def _goes_on_alone(rank: int, size: int) -> None:
    """A rank that has joined takes part in the parts with zeros."""
    with _meeting(size) as hvd:
        model = _Model(_linear, torch.float32)
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-5), model.named_parameters(), op=hvd.Sum)
        for step in range(STEPS if rank == 0 else STEPS // 2):
            ranks = range(size) if step < STEPS // 2 else [0]
            everyones = [torch.autograd.grad(_loss(model, step, r, 4, torch.float32), parameters) for r in ranks]
            optimizer.zero_grad()
            _loss(model, step, rank, 4, torch.float32).backward()
            optimizer.synchronize()
            for parameter, gradients in zip(parameters, zip(*everyones, strict=True), strict=True):
                torch.testing.assert_close(parameter.grad, torch.stack(gradients).sum(dim=0))
            with optimizer.skip_synchronize():
                optimizer.step()
        assert _n_made(optimizer) > 0
        assert hvd.join() == 0


def test_with_a_rank_that_has_joined() -> None:
    run_ranks(_goes_on_alone, 2)


def _is_off(rank: int, size: int) -> None:
    with _meeting(size) as hvd:
        assert _train(hvd, _Model(_linear, torch.float32)) == 0


def test_off() -> None:
    run_fresh_processes(_is_off, 2, env={"HORON_REDUCE_WHILE_MADE": "off"})


def _lets_go(rank: int, size: int) -> None:
    """What the product is made from is not kept until the step."""
    with _meeting(size) as hvd:
        held: list[weakref.ref[torch.Tensor]] = []

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x = x * 2
            held[:] = [weakref.ref(x)]
            return _linear(x, weight)

        model = _Model(product, torch.float32)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = _loss(model, step, rank, 4, torch.float32)
            loss.backward()
            assert held[0]() is None
            optimizer.step()
        assert _n_made(optimizer) > 0


def test_lets_go_of_what_it_is_made_from() -> None:
    run_ranks(_lets_go, 2)
