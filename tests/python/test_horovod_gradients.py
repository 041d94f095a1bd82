"""Gradients that a script keeps, and what it may do with them, under a DistributedOptimizer."""

from __future__ import annotations

from typing import Any

import horon
import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

SMALL, LARGE = 7, 300  # a weight of LARGE x LARGE goes by itself, all others together


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(SMALL, LARGE), nn.Tanh(), nn.Linear(LARGE, LARGE), nn.Tanh(), nn.Linear(LARGE, 3))


def _backward(model: nn.Module, step: int, rank: int) -> None:
    batch = torch.randn(5, SMALL, generator=torch.Generator().manual_seed(10 * step + rank))
    model(batch).square().mean().backward()


def _optimizer(hvd: Any, model: nn.Module, **more: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **more)


def _step(optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _kept(rank: int, size: int, how: str) -> None:
    """As in plain PyTorch, gradients of earlier steps stay what they were, and so does what shares their memory."""
    with horovod() as hvd:
        model = _model()
        more = {"compression": hvd.Compression.fp16} if how == "compressed" else {}
        optimizer = _optimizer(hvd, model, **more)
        kept: list[list[torch.Tensor]] = []
        copies: list[list[torch.Tensor]] = []
        for step in range(4):
            optimizer.zero_grad()
            if how != "missing" or step % 2 == 0:
                _backward(model, step, rank)
            optimizer.synchronize()
            gradients = _gradients(model)
            assert len(gradients) == 6
            shown = [g.view(-1) for g in gradients] if how == "views" else gradients
            kept.append(shown)
            copies.append([one.clone() for one in shown])
            _step(optimizer)
        for tensors, expected in zip(kept, copies, strict=True):
            for tensor, value in zip(tensors, expected, strict=True):
                assert torch.equal(tensor, value)
        assert not torch.equal(kept[0][0], kept[1][0])
        if size > 1 and how != "missing":  # those of now are still where they are reduced without a copy
            assert all(horon.is_in_arena(g) for g in _gradients(model))
        # What is kept belongs to whoever keeps it.
        kept[0][0].fill_(5)
        assert torch.equal(kept[1][0], copies[1][0])
        assert torch.equal(kept[-1][0], copies[-1][0])


@pytest.mark.parametrize("how", ["gradients", "views", "compressed", "missing"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_earlier_steps_stay_what_they_were(size: int, how: str) -> None:
    if size == 1 and how == "missing":
        pytest.skip("alone, nothing is added for a gradient that is missing")
    run_ranks(_kept, size, how)


def _kept_in_place(rank: int, size: int) -> None:
    """With zero_grad(set_to_none=False) a gradient is one tensor for good, and what shares its memory follows it."""
    with horovod() as hvd:
        model = _model()
        optimizer = _optimizer(hvd, model)
        _backward(model, 0, rank)
        optimizer.synchronize()
        _step(optimizer)
        optimizer.zero_grad(set_to_none=False)
        first = _gradients(model)
        flat = [g.view(-1) for g in first]
        for step in range(1, 4):
            _backward(model, step, rank)
            optimizer.synchronize()
            for now, before, view in zip(_gradients(model), first, flat, strict=True):
                assert now is before
                assert torch.equal(view, now.view(-1))
            _step(optimizer)
            optimizer.zero_grad(set_to_none=False)


def test_gradients_in_place_are_the_same_tensors() -> None:
    run_ranks(_kept_in_place, 2)


def _nothing_is_kept(rank: int, size: int, set_to_none: bool) -> None:
    """Ordinary training copies nothing aside."""
    with horovod() as hvd:
        model = _model()
        optimizer = _optimizer(hvd, model)
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            _backward(model, step, rank)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            _step(optimizer)
        count = optimizer._horon_reducer._hooks
        assert count.n_set_aside == 0
        kept = model[0].weight.grad
        optimizer.zero_grad()
        _backward(model, 9, rank)
        optimizer.synchronize()
        assert count.n_set_aside == int(set_to_none or kept is not model[0].weight.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_is_copied_aside_where_nothing_is_kept(set_to_none: bool) -> None:
    run_ranks(_nothing_is_kept, 2, set_to_none)


def _zeroed_by_hand(rank: int, size: int) -> None:
    """As torch.optim's zero_grad() once did, and as many scripts' own still do."""
    with horovod() as hvd:
        model = _model()
        optimizer = _optimizer(hvd, model)
        for step in range(3):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            _backward(model, step, rank)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for gradient in _gradients(model):
            gradient.detach_()
        optimizer.zero_grad()
        optimizer.synchronize()  # zeros for all, none of which was made by autograd
        for gradient in _gradients(model):
            gradient.detach_()
            assert not gradient.any()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_can_be_detached_and_zeroed_by_hand(size: int) -> None:
    run_ranks(_zeroed_by_hand, size)
