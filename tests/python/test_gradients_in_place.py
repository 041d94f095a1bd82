"""Gradients that the backward pass makes right in DistributedOptimizer's buckets, and what else may lie there.

On the CPU, and on simulated GPUs whose queues run late; on a GPU: tests/gpu/test_gpu_gradients_in_place.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from cuda_simulator import CudaSimulator, has_gpu_parts, needs_gpu_parts
from harness import expect_error, on_gloo, run_ranks
from horovod_session import horovod

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

LATE = {"HORON_SIMULATOR_DELAY_US": "400"}
SHAPES = [(7,), (300, 10), (1,), (64,), (64,), (5, 3, 2), (2000,)]
STEPS = 6
LEARNED = 2
"""From this step on gradients are made in their places: the first one lays out the buckets, the second one shows what
the nodes of the backward pass allocate."""


def _note(made_at: dict[int, int], i: int, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    made_at[i] = parameter.grad.data_ptr()


class _Watched:
    """Parameters under a DistributedOptimizer, and where each gradient was when autograd had just stored it."""

    def __init__(self, hvd: ModuleType, parameters: list[torch.Tensor], **arguments: Any) -> None:
        import torch

        self.parameters = parameters
        self.made_at: dict[int, int] = {}
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0, foreach=False),
            named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
            **arguments,
        )
        for i, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, self.made_at, i))  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Steps with the gradients that synchronize() has reduced."""
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def memory(self) -> int:
        """Where the one bucket is."""
        (bucket,) = self.optimizer._horon_reducer._buckets
        return int(bucket.parts[0]._buffer.data_ptr())

    def in_place(self) -> list[bool]:
        """By parameter, whether the last gradient was made where it is now."""
        return [p.grad is not None and p.grad.data_ptr() == self.made_at[i] for i, p in enumerate(self.parameters)]


def _parameters(device: str, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    import torch

    return [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]


def _factor(shape: tuple[int, ...], i: int, rank: float, step: int) -> torch.Tensor:
    import torch

    n = torch.Size(shape).numel()
    return (torch.arange(n) % 13 + i + 10 * rank + 100 * step).view(shape).float()


def _backward(parameters: list[torch.Tensor], rank: int, step: int) -> None:
    """The gradient of parameter i is its factor."""
    import torch

    device = parameters[0].device

    losses = [p * _factor(tuple(p.shape), i, rank, step).to(device) for i, p in enumerate(parameters)]
    torch.autograd.backward(losses, [torch.ones(p.shape).to(device) for p in parameters])


def _check(
    gradients: list[Any], step: int, size: int, skip: tuple[int, ...] = (), numbers: tuple[int, ...] | None = None
) -> None:
    import torch

    for i, gradient in zip(numbers or range(len(gradients)), gradients, strict=True):
        if i not in skip:
            wanted = _factor(tuple(gradient.shape), i, (size - 1) / 2, step)
            assert torch.equal(gradient.cpu(), wanted), f"step {step}, {i}: {gradient.cpu().flatten()[:4]}"


def _made_in_place(rank: int, size: int, device: str) -> None:
    """Without and with memory of before; what somebody keeps stays as it is."""
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        kept: list[tuple[int, list[Any]]] = []
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            if step >= LEARNED:
                assert all(watched.in_place()), f"step {step}: {watched.in_place()}"
            gradients = [p.grad for p in watched.parameters]
            _check(gradients, step, size)
            if step % 2:
                kept.append((step, gradients))
            del gradients
            for of, old in kept:
                _check(old, of, size)
            watched.step()
        assert len(kept) == 3
        assert watched.optimizer._horon_reducer._hooks.n_set_aside == 2, "copies of what was kept before the last step"


def _given(rank: int, size: int, device: str) -> None:
    """Gradients that others have, too, which autograd copies: the caller's own, one of two parameters, an expanded."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (300,), (300,), (20, 30)]))
        own, first, second, wide = watched.parameters
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            given = _factor((500,), 0, rank, step).to(device)
            shared = _factor((300,), 1, rank, step).to(device)
            value = torch.tensor([[float(rank + step)]]).to(device).expand(20, 30)
            torch.autograd.backward([own, first + second, wide.view_as(wide)], [given, shared, value])
            watched.optimizer.synchronize()
            if step >= LEARNED:
                assert all(watched.in_place()), f"step {step}: {watched.in_place()}"
            _check([own.grad, first.grad], step, size)
            assert torch.equal(second.grad.cpu(), first.grad.cpu())
            assert torch.equal(wide.grad.cpu(), torch.full((20, 30), step + (size - 1) / 2))
            assert torch.equal(given.cpu(), _factor((500,), 0, rank, step)), "the caller's tensor has changed"
            assert torch.equal(shared.cpu(), _factor((300,), 1, rank, step)), "the caller's tensor has changed"
            watched.step()


def _one_node(rank: int, size: int, device: str) -> None:
    """A node that makes the gradients of all parameters, as a compiled model's does, last ones first."""
    import torch

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
            n = len(tensors) // 2
            ctx.save_for_backward(*tensors[n:])
            return tuple(p * x for p, x in zip(tensors[:n], tensors[n:], strict=True))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            pairs = zip(reversed(gradients), reversed(ctx.saved_tensors), strict=True)
            return (*reversed([gradient * x for gradient, x in pairs]), *[None] * len(gradients))

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(64,)] * 5 + [(300, 10), (64,)]))
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            factors = [_factor(tuple(p.shape), i, rank, step).to(device) for i, p in enumerate(watched.parameters)]
            products = Products.apply(*watched.parameters, *factors)
            torch.autograd.backward(products, [torch.ones(p.shape).to(device) for p in watched.parameters])
            watched.optimizer.synchronize()
            assert all(watched.in_place()) or step < LEARNED, f"step {step}: {watched.in_place()}"
            _check([p.grad for p in watched.parameters], step, size)
            watched.step()


def _used_several_times(rank: int, size: int, device: str) -> None:
    """Gradients that are sums: autograd adds to the first part, or, if that is a view, makes each sum anew."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(30, 10), (300,), (64,)]))
        turned, plain, once = watched.parameters
        for step in range(2 * STEPS):
            uses = 2 if step >= STEPS else 3
            watched.optimizer.zero_grad()
            losses = [once * _factor((64,), 2, rank, step).to(device)]
            for use in range(uses):
                losses.append(turned.t() * _factor((10, 30), use, rank, step).to(device))
                losses.append(plain * _factor((300,), use, rank, step).to(device))
            torch.autograd.backward(losses, [torch.ones(loss.shape).to(device) for loss in losses])
            watched.optimizer.synchronize()
            if step >= LEARNED and step not in (STEPS, STEPS + 1):
                assert all(watched.in_place()), f"step {step}: {watched.in_place()}"
            for parameter, shape in ((turned.grad.t(), (10, 30)), (plain.grad, (300,))):
                wanted = sum(_factor(shape, use, (size - 1) / 2, step) for use in range(uses))
                assert torch.equal(parameter.cpu(), wanted), f"step {step}"
            watched.step()


def _layers(rank: int, size: int, device: str) -> None:
    """What models are made of: nothing of it is copied, and the gradients are those of the average of the losses."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16)
            )
            self.words = nn.Embedding(20, 16)
            self.reader = nn.TransformerEncoderLayer(16, 4, 40, dropout=0.0, batch_first=True)
            self.memory = nn.GRU(16, 16, batch_first=True)
            self.norm = nn.LayerNorm(16)

        def forward(self, pictures: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            read = self.reader(self.words(words) + self.picture(pictures).unsqueeze(1))
            return self.norm(self.memory(read)[0])  # type: ignore[no-any-return]

    def loss_of(model: Model, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        pictures = torch.randn(4, 3, 8, 8, generator=generator)
        words = torch.randint(0, 20, (4, 5), generator=generator)
        weights = torch.randn(4, 5, 16, generator=generator)
        return (model(pictures, words) * weights).sum()

    with horovod() as hvd:
        torch.manual_seed(1)
        model, plain = Model().eval(), Model().eval()
        plain.load_state_dict(model.state_dict())
        watched = _Watched(hvd, list(model.parameters()))
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
            watched.optimizer.synchronize()
            assert all(watched.in_place()) or step < LEARNED, f"step {step}: {watched.in_place()}"
            plain.zero_grad()
            for r in range(size):
                (loss_of(plain, r, step) / size).backward()  # type: ignore[no-untyped-call]
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def _options(rank: int, size: int, device: str) -> None:
    with horovod() as hvd:
        for arguments, set_to_none, in_place in [
            ({"backward_passes_per_step": 2}, True, True),
            ({}, False, True),
            ({"compression": hvd.Compression.bf16}, True, True),
            ({"num_groups": 2}, True, device == "cpu"),  # on GPUs their memory lies side by side
        ]:
            watched = _Watched(hvd, _parameters(device), **arguments)
            passes = arguments.get("backward_passes_per_step", 1)
            for step in range(4):
                watched.optimizer.zero_grad(set_to_none=set_to_none)
                for _ in range(passes):
                    _backward(watched.parameters, rank, 0)
                watched.optimizer.synchronize()
                assert all(watched.in_place()) == in_place or step < LEARNED, (arguments, step, watched.in_place())
                if passes == 1:
                    _check([p.grad for p in watched.parameters], 0, size)
                else:
                    _check([p.grad / passes for p in watched.parameters], 0, size)
                watched.step()


def _function(before: list[int], kept: list[Any]) -> Any:
    """The product of two tensors, whose gradient by the first is the before[0]-th tensor that backward() makes; the
    others are kept."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return p * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (x,) = ctx.saved_tensors
            for _ in range(before[0]):
                kept.append(x * x)
            return gradients[0] * x, None

    return Product.apply


def _something_else_lies_there(rank: int, size: int, device: str, changes_at: int) -> None:
    """From one step on the node makes another tensor of the gradient's size first, which lives on."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (500,), (33,)]))
        before, kept = [0], []
        product = _function(before, kept)
        last: list[Any] = []
        for step in range(STEPS):
            before[0] = 1 if step >= changes_at else 0
            kept.clear()
            watched.optimizer.zero_grad()
            factors = [_factor(tuple(p.shape), i, rank, step).to(device) for i, p in enumerate(watched.parameters)]
            losses = [product(p, x) for p, x in zip(watched.parameters[:2], factors, strict=False)]
            losses.append(watched.parameters[2] * factors[2])
            torch.autograd.backward(losses, [torch.ones(p.shape).to(device) for p in watched.parameters])
            watched.optimizer.synchronize()
            _check(last, step - 1, size)
            last = [p.grad for p in watched.parameters]
            _check(last, step, size)
            assert len(kept) == 2 * before[0]
            # Autograd goes from the last to the first.
            for i, tensor in zip((1, 0), kept, strict=False):
                wanted = factors[i].cpu() ** 2
                assert torch.equal(tensor.cpu(), wanted), f"step {step}: a tensor that was kept has changed"
            if changes_at < 1 and step >= LEARNED:
                assert all(watched.in_place()), watched.in_place()  # the second of its size is the gradient: learned
            assert watched.in_place()[2] or step < LEARNED or step == changes_at
            watched.step()


def _hooks_of_the_user(rank: int, size: int, device: str) -> None:
    """What sees the gradient before it is stored may keep it, or return another one."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (500,), (500,)]))
        kept: list[Any] = []
        watched.parameters[0].register_hook(lambda gradient: gradient * torch.full((500,), 3.0).to(device))  # type: ignore[no-untyped-call]
        watched.parameters[1].register_hook(kept.append)  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            gradients = [p.grad for p in watched.parameters]
            _check([gradients[0] / 3, *gradients[1:]], step, size)
            for of, gradient in enumerate(kept):
                assert torch.equal(gradient.cpu(), _factor((500,), 1, rank, of)), f"step {step}: kept of {of}"
            watched.step()


def _never_in_place(rank: int, size: int, device: str) -> None:
    """A gradient that is always made elsewhere is copied; the bucket stays where it is, and the others in it."""
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (40,), (300,)]))
        factor = _factor((40,), 0, 0, 3).to(device)

        def replace(p: torch.Tensor) -> None:
            assert p.grad is not None
            p.grad = p.grad * factor

        watched.parameters[1].register_post_accumulate_grad_hook(replace)  # type: ignore[no-untyped-call]
        memory = 0
        for step in range(2 * STEPS):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            _check([watched.parameters[0].grad, watched.parameters[2].grad], step, size, numbers=(0, 2))
            if step > STEPS:
                assert watched.memory() == memory, f"step {step}: the bucket has moved"
                assert watched.in_place()[0] and watched.in_place()[2]
            memory = watched.memory()
            watched.step()


def _gradients_that_are_given_to_the_caller(rank: int, size: int, device: str) -> None:
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            of_step = [p.grad for p in watched.parameters]
            watched.step()
            watched.optimizer.zero_grad()
            x = _factor((2000,), 6, rank, step).to(device)
            (given,) = torch.autograd.grad(
                watched.parameters[6] * x, [watched.parameters[6]], torch.ones(2000).to(device)
            )
            _check(of_step, step, size)
            assert torch.equal(given.cpu(), x.cpu())


def _a_pass_that_fails(rank: int, size: int, device: str) -> None:
    """What it has made, and somebody still has, is not written to later."""
    import torch

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return p * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (x,) = ctx.saved_tensors
            result = gradients[0] * x
            if fails:
                left.append(result)
                raise RuntimeError("on purpose")
            return result, None

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (40,)]))
        left: list[Any] = []
        for step in range(STEPS):
            fails = step == 3
            watched.optimizer.zero_grad()
            x = _factor((500,), 0, rank, step).to(device)
            loss = Failing.apply(watched.parameters[0], x)
            if fails:
                with pytest.raises(RuntimeError, match="on purpose"):
                    loss.backward(torch.ones(500).to(device))
                fails = False
                loss = Failing.apply(watched.parameters[0], x)
            (watched.parameters[1] * _factor((40,), 1, rank, step).to(device)).backward(torch.ones(40).to(device))
            loss.backward(torch.ones(500).to(device))
            watched.optimizer.synchronize()
            _check([p.grad for p in watched.parameters], step, size)
            assert all(torch.equal(tensor.cpu(), _factor((500,), 0, rank, 3)) for tensor in left), step
            watched.step()
        assert len(left) == 1


def _missing_ones(rank: int, size: int, device: str) -> None:
    """A parameter without a gradient gets zeros where another tensor, of a pass that failed, may lie."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (500,)]))
        before, kept = [0], []
        product = _function(before, kept)
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            x = _factor((500,), 0, rank, step).to(device)
            losses = [product(watched.parameters[0], x)]
            if step < 3:
                losses.append(watched.parameters[1] * _factor((500,), 1, rank, step).to(device))
            torch.autograd.backward(losses, [torch.ones(500).to(device)] * len(losses))
            watched.optimizer.synchronize()
            gradients = [p.grad for p in watched.parameters]
            _check(gradients, step, size, skip=() if step < 3 else (1,))
            if step >= 3:
                assert not gradients[1].cpu().any()
            watched.step()


def _kept_within_a_step(rank: int, size: int, device: str, how: str) -> None:
    """A script that keeps a gradient before it is reduced, and gives the parameter another one, or none."""
    import torch

    with horovod() as hvd:
        passes = 2 if how == "between passes" else 1
        watched = _Watched(hvd, _parameters(device, [(500,), (40,)]), backward_passes_per_step=passes)
        kept: list[Any] = []
        parameter = watched.parameters[0]

        def keep_and_replace(p: torch.Tensor) -> None:
            assert p.grad is not None
            kept.append(p.grad)
            p.grad = p.grad * _factor((500,), 0, 0, 3).to(device)

        if how == "by a hook":
            parameter.register_post_accumulate_grad_hook(keep_and_replace)  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            kept.clear()
            watched.optimizer.zero_grad()
            if how == "between passes":
                _backward(watched.parameters, rank, step)
                kept.extend(p.grad for p in watched.parameters)
                for p in watched.parameters:
                    p.grad = None
                _backward(watched.parameters, rank, step + 1)
            elif how == "by a hook":
                _backward(watched.parameters, rank, step)
            else:
                # The other one of the bucket has no gradient, so that nothing is sent by the backward pass.
                (parameter * _factor((500,), 0, rank, step).to(device)).backward(torch.ones(500).to(device))
                keep_and_replace(parameter)
            watched.optimizer.synchronize()
            assert torch.equal(kept[0].cpu(), _factor((500,), 0, rank, step)), f"step {step}"
            of_all = _factor((500,), 0, (size - 1) / 2, step + passes - 1)
            wanted = of_all if passes == 2 else of_all * _factor((500,), 0, 0, 3)
            assert torch.equal(parameter.grad.cpu(), wanted), f"step {step}"
            watched.step()


def _kept_beside_others(rank: int, size: int, device: str) -> None:
    """A gradient that a script keeps, while others of its bucket are accumulated in place, stays as it is."""
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (40,), (300,)]))
        for step in range(STEPS):
            of_step = watched.parameters[0].grad
            watched.optimizer.zero_grad(set_to_none=False)
            kept = None if of_step is None else of_step.copy_(_factor((500,), 0, rank, 50).to(device))
            watched.parameters[0].grad = None
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            _check([p.grad for p in watched.parameters], step, size)
            assert kept is None or (kept.cpu() == _factor((500,), 0, rank, 50)).all(), f"step {step}"
            watched.step()


def _given_up(rank: int, size: int, device: str) -> None:
    """A step that is given up between its passes, or before it is sent, leaves gradients that count for the next."""
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device), backward_passes_per_step=2)
        for step in range(2 * STEPS):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            if step == STEPS:
                watched.optimizer.load_state_dict(watched.optimizer.state_dict())
                _backward(watched.parameters, rank, step)
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            n = 3 if step == STEPS else 2
            _check([p.grad / n for p in watched.parameters], step, size)
            assert all(watched.in_place()) or step < LEARNED, f"step {step}: {watched.in_place()}"
            watched.step()


def _refused(rank: int, size: int, device: str) -> None:
    """The second backward pass of a step is an error, and leaves the first one's gradients, which are on their way."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            if device == "cuda":
                torch.cuda._sleep(int(20 * 1.98e6))
            _backward(watched.parameters, rank, step)
            if step >= 3:
                for parameter in watched.parameters:
                    parameter.grad = None
                expect_error(lambda: _backward(watched.parameters, rank, 77), "backward_passes_per_step")
            watched.optimizer.synchronize()
            _check([p.grad for p in watched.parameters], step, size)
            watched.step()


def _outlives_the_optimizer(rank: int, size: int, device: str) -> None:
    import gc

    with horovod() as hvd:
        parameters = _parameters(device)
        for _ in range(2):
            watched = _Watched(hvd, parameters)
            for step in range(4):
                watched.optimizer.zero_grad()
                _backward(parameters, rank, step)
                watched.optimizer.synchronize()
                assert all(watched.in_place()) or step < LEARNED
                watched.step()
            gradients = [p.grad for p in parameters]
            del watched
            gc.collect()
            _check(gradients, 3, size)
            for parameter in parameters:
                parameter.grad = None
            _backward(parameters, rank, 5)
            _check(gradients, 3, size)
            for i, parameter in enumerate(parameters):
                assert parameter.grad is not None
                assert (parameter.grad.cpu() == _factor(tuple(parameter.shape), i, rank, 5)).all()


def _used_on_a_second_stream(rank: int, size: int, device: str) -> None:
    """record_stream() on a gradient that is about to be stored: it is left alone until the stream has come past."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device, [(500,), (40,)]))
        side = torch.cuda.Stream()
        copies: list[Any] = []

        def use(gradient: torch.Tensor) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(30 * 1.98e6))
                copies.append(gradient.clone())
            gradient.record_stream(side)

        for step in range(STEPS):
            if step == 3:
                watched.parameters[0].register_hook(use)  # type: ignore[no-untyped-call]
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            _check([p.grad for p in watched.parameters], step, size)
            watched.step()
        torch.cuda.synchronize()
        for i, copy in enumerate(copies):
            assert torch.equal(copy.cpu(), _factor((500,), 0, rank, 3 + i)), i
        assert len(copies) == STEPS - 3


def _pools(rank: int, size: int, device: str) -> None:
    """Who routes allocations into a memory pool has them there."""
    import torch

    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        pool = torch.cuda.MemPool()
        for step in range(STEPS):
            watched.optimizer.zero_grad()
            if step in (0, 3):
                with torch.cuda.use_mem_pool(pool):
                    _backward(watched.parameters, rank, step)
            else:
                _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            assert watched.in_place() == [step != 3] * len(SHAPES) or step < LEARNED, step
            # As torch's graphs of compiled models demand it.
            assert torch._C._has_Standard_Deleter(torch.empty(3, device=device).untyped_storage()._cdata)
            _check([p.grad for p in watched.parameters], step, size)
            watched.step()


def _mistyped(rank: int, size: int, device: str) -> None:
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        expect_error(lambda: _backward(watched.parameters, rank, 0), "HORON_GRADIENTS_IN_PLACE", "on or off", "yes")


def _turned_off(rank: int, size: int, device: str) -> None:
    with horovod() as hvd:
        watched = _Watched(hvd, _parameters(device))
        for step in range(4):
            watched.optimizer.zero_grad()
            _backward(watched.parameters, rank, step)
            watched.optimizer.synchronize()
            assert not any(watched.in_place())
            _check([p.grad for p in watched.parameters], step, size)


BODIES = [
    _made_in_place,
    _given,
    _one_node,
    _used_several_times,
    _options,
    _hooks_of_the_user,
    _never_in_place,
    _gradients_that_are_given_to_the_caller,
    _a_pass_that_fails,
    _missing_ones,
    _kept_beside_others,
    _given_up,
    _refused,
    _outlives_the_optimizer,
]


Run = Callable[..., None]


@pytest.fixture(params=["cpu", "cuda"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a body on two ranks, with the device as its third argument."""
    device: str = request.param
    if device == "cpu":
        return lambda body, *args, env=None: run_ranks(body, 2, device, *args, env=env)
    if not has_gpu_parts():
        pytest.skip("horon was built without its GPU parts; HORON_CUDA=1 says what they need")
    simulator: CudaSimulator = request.getfixturevalue("cuda_simulator")
    return lambda body, *args, env=None: simulator.run(
        body, 2, device, *args, backend="horon", env={**LATE, **(env or {})}
    )


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_gradients_in_place(run: Run, body: Callable[[int, int, str], None]) -> None:
    run(body)


@pytest.mark.parametrize("changes_at", [0, 1, 2, 3, 4])
def test_something_else_lies_there(run: Run, changes_at: int) -> None:
    run(_something_else_lies_there, changes_at)


@pytest.mark.parametrize("how", ["between passes", "by a hook", "before it is sent"])
def test_kept_within_a_step(run: Run, how: str) -> None:
    run(_kept_within_a_step, how)


def test_layers_of_models() -> None:
    run_ranks(_layers, 2, "cpu")


def test_turned_off(run: Run) -> None:
    run(_turned_off, env={"HORON_GRADIENTS_IN_PLACE": "off"})


def test_mistyped(run: Run) -> None:
    run(_mistyped, env={"HORON_GRADIENTS_IN_PLACE": "yes"})


@needs_gpu_parts
@pytest.mark.parametrize("body", [_used_on_a_second_stream, _pools], ids=lambda body: body.__name__.strip("_"))
def test_streams_and_pools(cuda_simulator: CudaSimulator, body: Callable[[int, int, str], None]) -> None:
    cuda_simulator.run(body, 2, "cuda", backend="horon", env=LATE)


def test_everything_of_torchs_allocator_is_passed_on() -> None:
    """A virtual function that the wrapper does not know would be torch's default, which may do nothing."""
    import torch

    include = Path(torch.__file__).parent / "include" / "c10"
    if not (include / "cuda/CUDACachingAllocator.h").exists():
        pytest.skip("this torch has no header of it")
    wrapper = Path(__file__).parents[2] / "torch_backend/cuda/gradient_cuda_allocator.cc"
    known = set(re.findall(r"\b(\w+)\(", wrapper.read_text()))
    for header, name in [
        ("cuda/CUDACachingAllocator.h", "CUDAAllocator"),
        ("core/CachingDeviceAllocator.h", "DeviceAllocator"),
        ("core/Allocator.h", "Allocator"),
    ]:
        text = (include / header).read_text()
        found = re.search(
            rf"^(?:class|struct)(?: C10_API)? {name}\b[^;]*?\{{(.*?)^\}};", text, re.DOTALL | re.MULTILINE
        )
        assert found, f"{header} has no {name}"
        functions = set(re.findall(r"virtual [^;{]*?\b(\w+)\(", found[1])) - {name}
        assert len(functions) > 2
        assert functions <= known, f"{name}: {sorted(functions - known)} are not passed on"
