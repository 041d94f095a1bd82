"""Gradients that the backward pass makes right in DDP's buckets (`horon.ddp_in_arena`), with and without
`gradient_as_bucket_view=True`, and everything that else may lie where they belong."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import horon
import pytest
import torch
from after_another import AfterAnother
from ddp_gradients import KIND, of_kind, views_and_own
from harness import assert_clean_exits, on_gloo, run_fresh_processes, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

WIDTH = 128  # 64 KiB a square of it
WIDE = 640  # 1.6 MiB: more than DDP's first bucket holds
STEPS = 5


def _linear(n_inputs: int = WIDTH, n_outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(n_inputs, n_outputs)


class _Chain(nn.Module):
    """Layers one after another, and what passes between them on request."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.watch: Callable[[int, torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.watch is not None:
                self.watch(i, x)
        return x


class _Sums(nn.Module):
    """Two parameters that get the very same gradient, one that is used twice, one through views, and one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH // 2, 2))
        self.table = nn.Embedding(300, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table(torch.arange(len(x)))
        x = x @ (self.a + self.b) / WIDTH
        x = torch.tanh(x @ self.twice / WIDTH) @ self.twice / WIDTH
        return torch.tanh(x @ self.turned.view(WIDTH, WIDTH).t().t() / WIDTH)


def _models(base: nn.Module, **options: Any) -> tuple[DDP, DDP]:
    """The same model under plain DDP and in the arena."""
    torch.manual_seed(1)
    options = {"bucket_cap_mb": 0.3, "gradient_as_bucket_view": KIND.are_views, **options}
    plain = DDP(copy.deepcopy(base), **options)
    model = DDP(copy.deepcopy(base), **options)
    return plain, horon.ddp_in_arena(model)


def _input(step: int, rank: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _same(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name: f"{what}: gradient of {n}: {text}")


class _Made:
    """Where each parameter's gradient was when autograd had just stored it, before DDP saw it."""

    def __init__(self, model: nn.Module) -> None:
        self.addresses: dict[nn.Parameter, int] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.addresses[parameter] = parameter.grad.data_ptr()

    def in_place(self) -> dict[nn.Parameter, bool]:
        """By parameter, whether it was made where it is now."""
        return {p: p.grad is not None and p.grad.data_ptr() == address for p, address in self.addresses.items()}


def _train(rank: int, models: tuple[DDP, DDP], step: int, batch: int = 16) -> None:
    for model in models:
        model.zero_grad()
        model(_input(step, rank, batch)).square().sum().backward()
    _same(models[1], models[0], f"step {step}")


def _made_in_place(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear(WIDTH, 300), _linear(300, WIDTH)))
    made, made_plain = _Made(models[1]), _Made(models[0])
    for step in range(STEPS):
        _train(rank, models, step)
        large = {p for p in models[1].parameters() if p.numel() > WIDTH * WIDTH // 2}
        # The buckets are DDP's own in the first two steps.
        assert len(large) == 3
        assert all(made.in_place()[p] for p in large) or step < 2, f"step {step}: {made.in_place().values()}"
        assert not any(made_plain.in_place().values()) or not KIND.are_views
        for p in models[1].parameters():
            assert p.grad is not None
            in_bucket = all(horon.is_in_arena(p.grad) for p in large) and step >= 2
            assert in_bucket or p not in large or step < 2
            assert KIND.are_views or p.grad.untyped_storage().nbytes() == p.grad.nbytes, f"step {step}"
        for p in models[1].parameters():
            p.grad = None


def _accumulates(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    for step in range(STEPS):
        for model in models:
            model.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                model(_input(step + 50, rank, 16)).square().sum().backward()
                model(_input(step + 60, rank, 16)).square().sum().backward()
            model(_input(step, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}")


def _held_gradients(rank: int, world_size: int) -> None:
    """As with plain DDP, gradients that are still held stay as they are until DDP reduces the next ones."""
    models = _models(_Chain(_linear(), _linear()))
    for step in range(STEPS):
        _train(rank, models, step)
        held = [[layer.weight.grad for layer in model.module.layers] for model in models]
        expected = [gradient.clone() for gradient in held[1]]
        for model in models:
            model.zero_grad()
            with model.no_sync():
                model(_input(step + 50, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}, no_sync")
        for model in models:
            model.zero_grad()
            model.module(_input(step + 60, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}, module")
        for ours, theirs, before in zip(held[1], held[0], expected, strict=True):
            assert torch.equal(ours, before), f"step {step}"
            torch.testing.assert_close(ours, theirs)


def _copied_and_pickled(rank: int, world_size: int) -> None:
    model = horon.ddp_in_arena(DDP(_Chain(_linear()), gradient_as_bucket_view=KIND.are_views))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for step in range(STEPS):
        for each in (model, *copies):
            each.zero_grad()
            each(_input(step, rank, 16)).square().sum().backward()
        for each in copies:
            _same(each, model, f"step {step}")


def _keep_gradient(seen: dict[int, torch.Tensor], i: int, x: torch.Tensor) -> None:
    x.register_hook(functools.partial(seen.__setitem__, i))  # type: ignore[no-untyped-call]


def _something_else_lies_there(rank: int, world_size: int, from_step: int) -> None:
    """With as many rows as columns, what passes back between layers has the size of the gradients."""
    models = _models(_Chain(_linear(), _linear(), _linear()))
    for step in range(STEPS):
        kept: list[dict[int, torch.Tensor]] = [{}, {}]
        for model, seen in zip(models, kept, strict=True):
            model.module.watch = functools.partial(_keep_gradient, seen)
        _train(rank, models, step, batch=WIDTH if step >= from_step else 16)
        for i in range(3):
            torch.testing.assert_close(kept[1][i], kept[0][i], msg=lambda text, i=i, s=step: f"{s}, {i}: {text}")
        # What was kept is still there after the next steps.
        before = {i: gradient.clone() for i, gradient in kept[1].items()}
        for model in models:
            model.module.watch = None
        _train(rank, models, step + 70, batch=WIDTH)
        assert all(torch.equal(kept[1][i], before[i]) for i in before)


class _TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.after_another = False
        self.is_second_plain = False
        self.a = nn.Parameter(torch.randn(WIDE, WIDE))
        self.b = nn.Parameter(torch.randn(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(1, WIDE // WIDTH)
        product: Any = AfterAnother.apply if self.after_another else torch.matmul
        second: Any = torch.matmul if self.is_second_plain else product
        result: torch.Tensor = product(x, self.a) + 2 * second(x, self.b)
        return result


def _something_else_in_one_bucket(rank: int, world_size: int) -> None:
    """It gets other memory when a gradient is there that DDP has seen."""
    models = _models(_TwoProducts(), bucket_cap_mb=25)
    for step in range(STEPS):
        AfterAnother.kept.clear()
        for model in models:
            model.module.is_second_plain = True
            model.module.after_another = step == 3
        _train(rank, models, step)
        assert len(AfterAnother.kept) == (2 if step == 3 else 0)
        assert all((kept == 7).all() for kept in AfterAnother.kept), f"step {step}"


def _something_else_in_two_buckets(rank: int, world_size: int) -> None:
    models = _models(_TwoProducts())
    for step in range(STEPS):
        AfterAnother.kept.clear()
        for model in models:
            model.module.after_another = step == 3  # when gradients are made in both places
        _train(rank, models, step)
        assert len(AfterAnother.kept) == (4 if step == 3 else 0)
        assert all((kept == 7).all() for kept in AfterAnother.kept), f"step {step}"


def _shared_and_turned(rank: int, world_size: int, batch: int) -> None:
    models = _models(_Sums())
    for step in range(STEPS):
        _train(rank, models, step, batch)


def _hooks_of_the_user(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    kept: list[list[torch.Tensor]] = [[], []]
    for model, seen in zip(models, kept, strict=True):
        weights = [layer.weight for layer in model.module.layers]
        weights[0].register_hook(lambda gradient: gradient * 3)
        weights[1].register_hook(seen.append)
    for step in range(STEPS):
        _train(rank, models, step)
        for model in models:
            if step == 2:  # after ours
                model.module.layers[0].weight.register_hook(lambda gradient: gradient.mul_(2))
                model.module.layers[1].weight.register_hook(lambda gradient: gradient + 1)
    for a, b in zip(kept[1], kept[0], strict=True):
        torch.testing.assert_close(a, b)


def _gradients_that_are_given_to_the_caller(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    for step in range(STEPS):
        _train(rank, models, step)
        given = []
        for model in models:
            model.zero_grad()
            loss = model.module(_input(step, rank, 16)).square().sum()
            given.append(torch.autograd.grad(loss, [layer.weight for layer in model.module.layers]))
        before = [gradient.clone() for gradient in given[1]]
        for ours, theirs in zip(given[1], given[0], strict=True):
            torch.testing.assert_close(ours, theirs)
        _train(rank, models, step + 50)
        assert all(torch.equal(a, b) for a, b in zip(given[1], before, strict=True))
        # Only one of the weights: the other one's gradient is not made.
        for model in models:
            model.zero_grad()
            loss = model.module(_input(step, rank, 16)).square().sum()
            loss.backward(inputs=[model.module.layers[0].weight])
        torch.testing.assert_close(models[1].module.layers[0].weight.grad, models[0].module.layers[0].weight.grad)
        # With a graph of the gradients.
        twice = []
        for model in models:
            model.zero_grad()
            loss = model.module(_input(step, rank, 16)).square().sum()
            weight = model.module.layers[0].weight
            (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
            twice.append(torch.autograd.grad(first.square().sum(), [weight])[0])
        torch.testing.assert_close(twice[1], twice[0])


def _checkpointed(rank: int, world_size: int, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = _linear(), _Chain(_linear(), _linear())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

    models = _models(Checkpointed())
    for step in range(STEPS):
        _train(rank, models, step, WIDTH)


def _outlives_the_model(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    for step in range(STEPS):
        _train(rank, models, step)
    gradients = [layer.weight.grad for layer in models[1].module.layers]
    weights = [layer.weight for layer in models[1].module.layers]
    expected = [gradient.clone() for gradient in gradients]
    del models
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    # The parameters live on without DDP, and in a new one.
    for weight in weights:
        weight.grad = None
        (weight @ weight).sum().backward()
    base = _Chain(_linear(), _linear())
    for layer, weight in zip(base.layers, weights, strict=True):
        layer.weight = weight
    again = horon.ddp_in_arena(DDP(base, gradient_as_bucket_view=KIND.are_views))
    made = _Made(again)
    for step in range(STEPS):
        again.zero_grad()
        again(_input(step, rank, 16)).square().sum().backward()
    assert all(made.in_place()[weight] for weight in weights)


def _static_graph(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear(), _linear()), static_graph=True)
    for step in range(STEPS):
        _train(rank, models, step, batch=16 if step < 3 else WIDTH)


class _Alternating(nn.Module):
    """Uses one of two layers in each step, not the same one on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.either, self.other = _linear(), _linear(), _linear()
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        middle = (self.either, self.other)[(self.turn // 2) % 2]
        result: torch.Tensor = middle(torch.tanh(self.first(x)))
        return result


def _unused_parameters(rank: int, world_size: int) -> None:
    models = _models(_Alternating(), find_unused_parameters=True)
    for model in models:
        model.module.turn = rank
    for step in range(2 * STEPS):
        for model in models:
            model.zero_grad()
            model(_input(step, rank, 16 if step < 6 else WIDTH)).square().sum().backward()
        for (name, a), b in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name, s=step: f"step {s}, {n}: {text}")


def _compiled(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear(), _linear()))
    # Whose DDPOptimizer takes no buckets as small as ours.
    with torch._dynamo.config.patch(optimize_ddp=False):
        compiled = [torch.compile(model, backend="aot_eager") for model in models]
        for step in range(STEPS):
            for model in compiled:
                model.zero_grad()
                model(_input(step, rank, 16 if step < 3 else WIDTH)).square().sum().backward()
            _same(models[1], models[0], f"step {step}")


def _keep(gradient: torch.Tensor, how: str) -> Callable[[], torch.Tensor]:
    """Holds the gradient's memory, and nothing else of it; returns what shows it."""
    if how == "view":
        view = gradient.detach().view(-1)[1:]
        return lambda: view
    if how == "numpy":
        array = gradient.numpy()
        return lambda: torch.from_numpy(array)
    if how == "storage":
        storage = gradient.untyped_storage()
        return lambda: torch.tensor([], dtype=torch.float32).set_(storage)  # type: ignore[call-overload,no-any-return]
    return lambda: gradient


def _kept_over_steps(rank: int, world_size: int, how: str) -> None:
    models = _models(_Chain(_linear(), _linear(WIDTH, 300), _linear(300, WIDTH)))
    kept: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = []
    for step in range(2 * STEPS):
        for model in models:
            output = model(_input(step, rank, 16))
            model.zero_grad()  # between the two passes
            output.square().sum().backward()
        _same(models[1], models[0], f"step {step}")
        for show, before in kept:
            assert torch.equal(show(), before), f"step {step}"
        if step % 3 == 2:  # also steps in which nobody keeps anything new
            layers = list(models[1].module.layers)
            for layer in layers[-1:] if how == "of the last parameter" else layers:
                assert layer.weight.grad is not None
                show = _keep(layer.weight.grad, how)
                kept.append((show, show().clone()))


def _kept_of_another_ranks_use(rank: int, world_size: int) -> None:
    """DDP gives a rank that has not used a parameter the average, too."""
    models = _models(_Alternating(), find_unused_parameters=True)
    for model in models:
        model.module.turn = rank
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(3 * STEPS):
        for model in models:
            model.zero_grad()
            model(_input(step, rank, 16)).square().sum().backward()
        for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)
                kept.append((a.grad, a.grad.clone()))
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"


def _kept_while_not_used(rank: int, world_size: int) -> None:
    """DDP zeroes the places of parameters that a pass does not use."""
    models = _models(_Alternating(), find_unused_parameters=True)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(3 * STEPS):
        for model in models:
            model.module.turn = 2 * step  # the same layer on all ranks
            if step % 3 != 1:
                model.zero_grad()
            model(_input(step, rank, 16)).square().sum().backward()
        for (name, a), b in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name, s=step: f"step {s}, {n}: {text}")
                if step % 3 == 2 and step < 10:
                    kept.append((a.grad, a.grad.clone()))
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"


def _given_to_another(rank: int, world_size: int) -> None:
    """Gradients that lie in the bucket, but not where they belong."""
    models = _models(_Chain(_linear(), _linear(), _linear()))
    for step in range(4 * STEPS):
        for model in models:
            first, second, third = (layer.weight for layer in model.module.layers)
            if step % 4 == 1:
                first.grad, second.grad = second.grad, first.grad
            elif step % 4 == 2:
                first.grad, third.grad = third.grad, None
                second.grad = second.grad.clone()
            elif step % 4 == 3:
                first.grad = first.grad.t()
                third.grad = third.grad.detach()
            else:
                model.zero_grad()
            model(_input(step, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}")


def _returned_by_hooks(rank: int, world_size: int) -> None:
    """A hook that returns a gradient of another parameter, and one that keeps what it sees."""
    models = _models(_Chain(_linear(), _linear(), _linear()))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(2 * STEPS):
        for model in models:
            first, second, third = (layer.weight for layer in model.module.layers)
            handles = []
            if step % 4 == 3:
                handles.append(first.register_hook(lambda gradient, third=third: third.grad))
                handles.append(second.register_post_accumulate_grad_hook(lambda p: kept.append((p.grad.detach(), p))))
            model.zero_grad()
            model(_input(step, rank, 16)).square().sum().backward()
            for handle in handles:
                handle.remove()
        if step % 4 == 3:
            kept[-2:] = [(tensor, p.grad.clone()) for tensor, p in kept[-2:]]
        else:
            _same(models[1], models[0], f"step {step}")
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"


def _copies_are_small(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    for step in range(STEPS):
        _train(rank, models, step)
    for parameter in models[1].parameters():
        assert parameter.grad is not None
        copied = copy.deepcopy(parameter.grad)
        assert torch.equal(copied, parameter.grad)
        assert len(pickle.dumps(parameter.grad)) < parameter.grad.nbytes + 2000
        parameter.grad.resize_(parameter.numel() + 1)


def _kept_by_hooks_of_each_step(rank: int, world_size: int) -> None:
    """Hooks that keep a gradient of the last step, or take it for another parameter: memory does not grow."""
    models = _models(_Chain(_linear(), _linear(), _linear()))
    kept: list[list[torch.Tensor]] = [[], []]
    for model, seen in zip(models, kept, strict=True):
        first, second, third = (layer.weight for layer in model.module.layers)

        def keep(parameter: nn.Parameter, first: nn.Parameter = first, seen: list[torch.Tensor] = seen) -> None:
            if first.grad is not None:
                seen[:] = [first.grad]
                first.grad = None

        third.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        second.register_hook(lambda gradient, seen=seen: seen[0] if seen else gradient)
    used = 0
    for step in range(8 * STEPS):
        for model in models:
            if step % 4 == 0:
                model.zero_grad()
            model(_input(step, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}")
        for seen, theirs in zip(kept[1], kept[0], strict=True):
            torch.testing.assert_close(seen, theirs, msg=lambda text, s=step: f"step {s}: kept: {text}")
        if step == 3 * STEPS:
            used = horon.arena_statistics()["used_bytes"]
    assert horon.arena_statistics()["used_bytes"] <= used


class _Assigned:
    """Gradients that the caller has assigned, parts of a flat tensor, and that must stay those."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.gradients = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def check(self, other: _Assigned, what: str) -> None:
        for each in (self, other):
            assert all(p.grad is g for p, g in zip(each.parameters, each.gradients, strict=True)), what
        torch.testing.assert_close(self.flat, other.flat, msg=lambda text: f"{what}: {text}")


def _step_whole(model: DDP, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def _step_after_no_sync(model: DDP, x: torch.Tensor) -> None:
    output = model(x)
    with model.no_sync():
        model(x)
    output.square().sum().backward()


def _step_in_two(model: DDP, x: torch.Tensor) -> None:
    first, second = model(x)
    first.square().sum().backward()
    with torch.no_grad():
        model(x)
    second.square().sum().backward()


def _step_that_zeroes(model: DDP, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=False)
    model(x).square().sum().backward()


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _linear(), _linear()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


class _Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = _linear(), _linear(), _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))
        return result


class _Unusual(nn.Module):
    """Parameters that are not contiguous, of no elements, and of none but one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.convolution = nn.Conv2d(16, 32, 8).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.one = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:4].reshape(-1, 16, 1, 8).expand(-1, 16, 8, 8)
        convolved: torch.Tensor = self.convolution(images)
        return (x @ self.turned).sum() * self.one + convolved.square().sum() + self.none.sum()


ASSIGNED = [
    (lambda: _Chain(_linear(), _linear()), _step_whole),
    (lambda: _Chain(_linear(), _linear()), _step_after_no_sync),
    (lambda: _Chain(_linear(), _linear()), _step_that_zeroes),
    (_TwoOutputs, _step_in_two),
    (_Reentrant, _step_whole),
    (_Unusual, _step_whole),
]


def _stays_what_was_assigned(rank: int, world_size: int, case: int) -> None:
    make, run = ASSIGNED[case]
    models = _models(make())
    assigned = [_Assigned(model) for model in models]
    for step in range(2 * STEPS):
        for model in models:
            run(model, _input(step, rank, 16))
        assigned[1].check(assigned[0], f"step {step}")


def _stays_what_it_was(rank: int, world_size: int, case: int) -> None:
    """What the first backward pass has stored stays the gradient as long as it is not set to None."""
    make, run = ASSIGNED[case]
    models = _models(make())
    gradients: list[list[torch.Tensor | None]] = []
    for step in range(STEPS):
        for model in models:
            run(model, _input(step, rank, 16))
            if step == 0:
                gradients.append([p.grad for p in model.parameters()])
        for model, before in zip(models, gradients, strict=True):
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True)), f"step {step}"
        _same(models[1], models[0], f"step {step}")


def _kept_of_unusual_models(rank: int, world_size: int, case: int) -> None:
    make, run = ASSIGNED[case]
    models = _models(make())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(2 * STEPS):
        for model in models:
            model.zero_grad()
            run(model, _input(step, rank, 16))
        _same(models[1], models[0], f"step {step}")
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"
        kept += [(p.grad, p.grad.clone()) for p in models[1].parameters() if p.grad is not None]


def _called_past_the_hooks(rank: int, world_size: int) -> None:
    """With `model.forward` nobody undoes what DDP makes of gradients when it lays its buckets out anew: once, they
    become other tensors. What is kept later stays as it is."""
    models = _models(_Chain(_linear(), _linear()))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(2 * STEPS):
        for model in models:
            model.zero_grad(set_to_none=step > 3)
            model.forward(_input(step, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}")
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"
        if step >= 3:
            kept += [(layer.weight.grad, layer.weight.grad.clone()) for layer in models[1].module.layers]


def _joined_early(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(3):
        for model in models:
            with model.join():
                for step in range(3 + 2 * rank):
                    model.zero_grad()
                    model(_input(10 * turn + step, rank, 16)).square().sum().backward()
                    assert all(torch.equal(a, b) for a, b in kept), f"turn {turn}, step {step}"
        kept += [(p.grad, p.grad.clone()) for p in models[1].parameters() if p.grad is not None]


def _replaced_by_hooks(rank: int, world_size: int) -> None:
    """Hooks that keep the gradient that was just made, and put something else in its place."""
    models = _models(_Chain(_linear(), _linear()))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def double(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        kept.append((parameter.grad, parameter.grad.clone()))
        parameter.grad = parameter.grad * 2

    for model in models:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
    for step in range(2 * STEPS):
        _train(rank, models, step)
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"


class _Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        result: torch.Tensor = self.inner(x)
        return result


def _frozen_in_the_end(rank: int, world_size: int) -> None:
    models = _models(_Chain(_linear(), _linear()))
    _train(rank, models, 0)
    for model in models:
        module = model.module.requires_grad_(False)
    del models, model
    module(_input(0, rank, 16))


def _assigned_in_the_forward_pass(rank: int, world_size: int) -> None:
    models = _models(_Assigns())
    for step in range(STEPS):
        for model in models:
            model(_input(step, rank, 16)).square().sum().backward()
        _same(models[1], models[0], f"step {step}")


def _in_two_models(rank: int, world_size: int) -> None:
    """Layers that two models share, which take turns."""
    pairs = []
    torch.manual_seed(2)
    base = _linear(), _linear(), _linear()
    for in_arena in (False, True):
        shared, a, b = copy.deepcopy(base)
        models = [DDP(_Chain(shared, each)) for each in (a, b)]
        pairs.append([horon.ddp_in_arena(model) for model in models] if in_arena else models)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(3 * STEPS):
        for pair in pairs:
            for model in pair:
                model.zero_grad()
            pair[step % 2](_input(step, rank, 16)).square().sum().backward()
            if step % 3 == 2:
                pair[1 - step % 2](_input(step, rank, 16)).square().sum().backward()
        for ours, theirs in zip(pairs[1], pairs[0], strict=True):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None and b.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, msg=lambda text, s=step: f"step {s}: {text}")
                    kept.append((a.grad, a.grad.clone()))
        assert all(torch.equal(a, b) for a, b in kept), f"step {step}"


def _without_room(rank: int, world_size: int) -> None:
    """The buckets stay outside of the arena."""
    filling = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            filling.append(horon.empty(1000))
    for body in (_stays_what_was_assigned, _stays_what_it_was, _kept_of_unusual_models):
        body(rank, world_size, 0)


OWN_BODIES = [
    _joined_early,
    _replaced_by_hooks,
    _assigned_in_the_forward_pass,
    _frozen_in_the_end,
    _in_two_models,
    _kept_by_hooks_of_each_step,
    _kept_of_another_ranks_use,
    _kept_while_not_used,
    _called_past_the_hooks,
    _given_to_another,
    _returned_by_hooks,
    _copies_are_small,
]

BODIES = [
    _something_else_in_one_bucket,
    _something_else_in_two_buckets,
    _static_graph,
    _unused_parameters,
    _compiled,
    _made_in_place,
    _accumulates,
    _held_gradients,
    _copied_and_pickled,
    _hooks_of_the_user,
    _gradients_that_are_given_to_the_caller,
    _outlives_the_model,
]


@views_and_own
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_gradients_in_their_places(body: Callable[[int, int], None], are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, body)


@views_and_own
@pytest.mark.parametrize("from_step", [0, 3])
def test_something_else_lies_there(from_step: int, are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, _something_else_lies_there, from_step)


@views_and_own
@pytest.mark.parametrize("batch", [16, WIDTH, 300])
def test_shared_and_turned(batch: int, are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, _shared_and_turned, batch)


@views_and_own
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, are_views: bool) -> None:
    run_ranks(of_kind, 2, are_views, _checkpointed, reentrant)


@pytest.mark.parametrize("body", OWN_BODIES, ids=lambda body: body.__name__.strip("_"))
def test_own_gradients(body: Callable[[int, int], None]) -> None:
    run_ranks(of_kind, 2, False, body)


@pytest.mark.parametrize("case", range(len(ASSIGNED)))
@pytest.mark.parametrize("body", [_stays_what_was_assigned, _stays_what_it_was, _kept_of_unusual_models])
def test_unusual_ways_to_train(body: Callable[[int, int, int], None], case: int) -> None:
    run_ranks(of_kind, 2, False, body, case)


def test_own_gradients_without_room() -> None:
    env = {"HORON_ARENA_BYTES": "9000000"}
    assert_clean_exits(run_fresh_processes(of_kind, 2, False, _without_room, env=env, executed=True))


@pytest.mark.parametrize("how", ["itself", "view", "numpy", "storage", "of the last parameter"])
def test_own_gradients_that_are_kept(how: str) -> None:
    run_ranks(of_kind, 2, False, _kept_over_steps, how)
