"""HORON_DDP_IN_ARENA=on: the gradients of every DDP model lie in the arena, without a change to the program."""

from __future__ import annotations

import copy

import horon
import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes
from horon import _ddp_in_arena
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

ON = {"HORON_DDP_IN_ARENA": "on"}
STEPS = 5


def _base() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64))


def _input(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def _is_in_arena_after(model: nn.Module, rank: int, world_size: int) -> bool:
    """Trains it beside one that averages by hand; tells where the gradients are in the end."""
    reference = _base()
    for step in range(STEPS):
        for each in (model, reference):
            each.zero_grad()
            each(_input(step, rank)).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            expected = theirs.grad.clone()
            dist.all_reduce(expected)
            torch.testing.assert_close(ours.grad, expected / world_size)
    return all(horon.is_in_arena(p.grad) for p in model.parameters() if p.grad is not None and p.numel() > 10_000)


def _every_model(rank: int, world_size: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = DDP(_base(), **options)
        assert horon.ddp_in_arena(model) is model
        assert _is_in_arena_after(model, rank, world_size), options
        assert model.gradient_as_bucket_view == options.get("gradient_as_bucket_view", False)
        copied = copy.deepcopy(model)
        assert not _is_in_arena_after(copied, rank, world_size)
        copied.register_comm_hook(None, default_hooks.allreduce_hook)
        assert not _is_in_arena_after(copied, rank, world_size)


def _others(rank: int, world_size: int) -> None:
    gloo = DDP(_base(), process_group=dist.new_group(backend="gloo"))
    assert not _is_in_arena_after(gloo, rank, world_size)
    expect_error(lambda: horon.ddp_in_arena(gloo), "ddp_in_arena", "gloo")


def _hooks_of_the_user(rank: int, world_size: int) -> None:
    for has_trained in (False, True):
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model, built_in = DDP(_base(), **options), DDP(_base(), **options)
            if has_trained:
                assert _is_in_arena_after(model, rank, world_size) or "static_graph" in options
            seen = []

            def hook(state, bucket, seen=seen):  # type: ignore[no-untyped-def]  # DDP looks at annotations
                seen.append(bucket.index())
                return default_hooks.allreduce_hook(None, bucket)

            model.register_comm_hook(None, hook)
            built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            _is_in_arena_after(built_in, rank, world_size)
            _is_in_arena_after(model, rank, world_size)
            assert len(seen) >= STEPS
            expect_error(lambda model=model: model.register_comm_hook(None, hook), "only be called once")


def _in_two_models(rank: int, world_size: int) -> None:
    """Layers that two models have in common, which take part in one backward pass."""
    shared, reference = _base(), _base()
    models = [DDP(shared), DDP(nn.Sequential(shared, nn.Tanh()))]
    # The second would copy the first one's views, while they are averaged.
    assert all(_ddp_in_arena._passes_of(model) is None for model in models)
    for step in range(STEPS):
        shared.zero_grad()
        reference.zero_grad()
        x = _input(step, rank)
        (models[0](x).square().sum() + models[1](x).sum()).backward()
        (reference(x).square().sum() + torch.tanh(reference(x)).sum()).backward()
        for ours, theirs in zip(shared.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            expected = theirs.grad.clone()
            dist.all_reduce(expected)
            torch.testing.assert_close(ours.grad, expected / world_size, msg=lambda text, s=step: f"{s}: {text}")
    models[0].register_comm_hook(None, default_hooks.allreduce_hook)


def _all(rank: int, world_size: int) -> None:
    for body in (_every_model, _others, _hooks_of_the_user, _in_two_models):
        body(rank, world_size)
    dist.destroy_process_group()


def test_every_model_is_in_the_arena() -> None:
    assert_clean_exits(run_fresh_processes(_all, 2, env=ON, executed=True))


def _off(rank: int, world_size: int) -> None:
    assert not _is_in_arena_after(DDP(_base()), rank, world_size)
    dist.destroy_process_group()


@pytest.mark.parametrize("word", ["off", "0", ""])
def test_off(word: str) -> None:
    assert_clean_exits(run_fresh_processes(_off, 2, env={"HORON_DDP_IN_ARENA": word}, executed=True))


def _unknown_word(rank: int, world_size: int) -> None:
    def init() -> None:
        dist.init_process_group("horon", store=dist.HashStore(), rank=0, world_size=1)

    expect_error(init, "HORON_DDP_IN_ARENA", "expected on or off", "'maybe'")


def test_a_word_that_says_neither() -> None:
    env = {"HORON_DDP_IN_ARENA": "maybe"}
    assert_clean_exits(run_fresh_processes(_unknown_word, 1, env=env, init=False, executed=True))
