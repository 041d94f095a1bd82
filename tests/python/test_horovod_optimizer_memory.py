"""Where the gradients of a DistributedOptimizer lie, and what it leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import horon
import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from optimizer_training import check_same_everywhere, loss_of, make_batch, make_model, make_sgd

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _in_the_arena(rank: int, size: int, set_to_none: bool) -> None:
    with horovod() as hvd:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step, rank).backward()
            optimizer.step()
        small = [p for p in model.parameters() if p.numel() * 4 < 256 * 1024]
        assert small and all(horon.is_in_arena(p.grad) for p in small)
        # With set_to_none autograd makes the large ones, right in the arena.
        assert all(horon.is_in_arena(p.grad) for p in model.parameters())
        addresses = {p.grad.data_ptr() for p in small}
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, 9, rank).backward()
        optimizer.step()
        assert addresses == {p.grad.data_ptr() for p in small}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_live_in_the_arena(set_to_none: bool) -> None:
    run_ranks(_in_the_arena, 2, set_to_none)


def _only_gradients_in_the_arena(rank: int, size: int) -> None:
    weight = torch.ones(300, 300)
    with horovod() as hvd:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
        seen = []

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append(horon.is_in_arena(x @ weight))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> Any:
                seen.append(horon.is_in_arena(torch.empty(300, 300)))  # what autograd makes of that size
                seen.append(horon.is_in_arena(torch.empty(300, 301)))
                return grads[0].clone()

        Watch.apply(model[:2](make_batch(0, rank).repeat(20, 1)[:300])).mean().backward()
        assert seen == [False, True, False], seen
        assert not horon.is_in_arena(torch.empty(300, 300))
        optimizer.step()
        before = horon.arena_statistics()["used_bytes"]
        for _ in range(50):
            optimizer.zero_grad()
            loss_of(model, 1, rank).backward()
            optimizer.step()
        after = horon.arena_statistics()["used_bytes"]
        assert after < before + 2 * 4 * 300 * 300, (before, after)  # what autograd made last, and no more
        kept = model[2].weight.grad.clone()
        assert kept.isfinite().all()
        gradient = model[2].weight.grad
        del optimizer
        gc.collect()
        model.zero_grad()
        loss_of(model, 1, rank).backward()
        assert not horon.is_in_arena(model[2].weight.grad)
    # The gradient outlives the optimizer, and horon.
    assert torch.equal(gradient, kept)


def test_nothing_but_gradients_is_made_in_the_arena() -> None:
    # No fusion: its buffer, which lies in the arena too, would be made at a time that depends on the threads.
    run_ranks(_only_gradients_in_the_arena, 2, env={"HORON_FUSION_THRESHOLD": "0"})


def test_gradients_elsewhere_without_an_arena() -> None:
    run_ranks(_without_arena, 2, env={"HORON_ARENA_BYTES": "0"})


def _without_arena(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        check_same_everywhere(hvd, model)
        assert hvd.allreduce(torch.ones(1 << 19), op=hvd.Sum).sum().item() == size * (1 << 19)


def _hooks_go_with_the_optimizer(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = make_model()
        for _ in range(3):  # as in a loop that wraps anew: the old ones must not send
            optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
            optimizer.zero_grad()
            loss_of(model, 0, rank).backward()
            optimizer.step()
        del optimizer
        loss_of(model, 0, rank).backward()
        loss_of(model, 0, rank).backward()


def test_hooks_go_with_the_optimizer() -> None:
    run_ranks(_hooks_go_with_the_optimizer, 2)
