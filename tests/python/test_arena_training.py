"""Training with gradients in the arena: DDP's buckets, shared gradients without DDP, FSDP2's buffers."""

from __future__ import annotations

import copy

import horon
import pytest
import torch
import torch.distributed as dist
from harness import expect_error, on_gloo, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(16, 40, generator=generator)).square().sum()


def _compare(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name: f"{what}: gradient of {n}: {text}")


def _ddp(rank: int, world_size: int, as_view: bool, set_to_none: bool) -> None:
    # Small buckets: several of them, and other ones after the first step.
    plain = DDP(_model(), gradient_as_bucket_view=as_view, bucket_cap_mb=0.2)
    model = DDP(_model(), gradient_as_bucket_view=as_view, bucket_cap_mb=0.2)
    assert horon.ddp_in_arena(model) is model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, model)]
    used = []
    for step in range(6):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step == 3:
                with m.no_sync():
                    _loss(m, step + 50, rank).backward()
            _loss(m, step, rank).backward()
        _compare(model, plain, f"step {step}")
        if as_view:
            assert all(horon.is_in_arena(p.grad) for p in model.parameters() if p.grad is not None), f"step {step}"
        used.append(horon.arena_statistics()["used_bytes"])
        for optimizer in optimizers:
            optimizer.step()
    total = sum(p.numel() * 4 for p in model.parameters())
    assert used[0] >= total, "the first generation of buckets is not in the arena"
    assert total <= used[-1] < 2 * total, f"{used}: not exactly one generation of buckets in the arena"
    assert used[2:] == [used[2]] * 4, f"{used}: grows"


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_in_arena(world_size: int, as_view: bool, set_to_none: bool) -> None:
    run_ranks(_ddp, world_size, as_view, set_to_none)


def _ddp_options(rank: int, world_size: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[0](x) + self.parts[1 + rank % 2](x)

    torch.manual_seed(1)
    base = Branches()
    plain = DDP(copy.deepcopy(base), find_unused_parameters=True)
    model = horon.ddp_in_arena(DDP(copy.deepcopy(base), find_unused_parameters=True))
    for step in range(3):
        for m in (plain, model):
            m.zero_grad()
            _loss(m, step, rank).backward()
        _compare(model, plain, f"step {step}")
    # NumPy's view of a gradient, taken before the bucket moved, stays valid memory.
    model = horon.ddp_in_arena(DDP(_model(), gradient_as_bucket_view=True))
    _loss(model, 0, rank).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    alias = gradient.numpy()
    for step in range(3):
        model.zero_grad(set_to_none=False)
        _loss(model, step, rank).backward()
    assert alias.shape == gradient.shape and float(alias.sum()) is not None
    # One hook only, DDP models only.
    expect_error(lambda: horon.ddp_in_arena(model), "RuntimeError")
    expect_error(lambda: horon.ddp_in_arena(_model()), "TypeError")  # type: ignore[arg-type]
    gloo = dist.new_group(backend="gloo")
    message = expect_error(lambda: horon.ddp_in_arena(DDP(_model(), process_group=gloo)), "ValueError")
    assert "gloo" in message, message


def test_ddp_in_arena_with_unused_parameters_aliases_and_errors() -> None:
    run_ranks(_ddp_options, 2)


def _shared(rank: int, world_size: int, set_to_none: bool) -> None:
    plain, model = DDP(_model()), _model()
    gradients = horon.share_gradients(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, model)]
    for step in range(5):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step == 2:  # accumulated
                if m is plain:
                    with plain.no_sync():
                        _loss(m, step + 50, rank).backward()
                else:
                    _loss(m, step + 50, rank).backward()
            _loss(m, step, rank).backward()
        assert all(horon.is_in_arena(p.grad) for p in model.parameters() if p.grad is not None)
        gradients.average()
        _compare(model, plain, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    gradients.remove()
    model.zero_grad()
    _loss(model, 0, rank).backward()
    assert not any(horon.is_in_arena(p.grad) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_share_gradients(world_size: int, set_to_none: bool) -> None:
    run_ranks(_shared, world_size, set_to_none)


def _shared_options(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(5, 5) for name in ("all", "first", "unused")})
    model["bf16"] = nn.Linear(5, 5).to(torch.bfloat16)
    model["all"].weight.data = model["all"].weight.data.t()  # not contiguous
    model["frozen"] = nn.Linear(5, 5).requires_grad_(False)
    gradients = horon.share_gradients(model)
    x = torch.full((2, 5), rank + 1.0)
    for _ in range(3):
        model.zero_grad()
        y = model["all"](x) + model["bf16"](x.bfloat16()).float()
        if rank == 0:
            y = y + model["first"](x)
        y.sum().backward()
        gradients.average()
        average = sum(range(1, world_size + 1)) / world_size
        torch.testing.assert_close(model["all"].weight.grad, torch.full((5, 5), 2 * average))
        torch.testing.assert_close(model["bf16"].weight.grad, torch.full((5, 5), 2 * average, dtype=torch.bfloat16))
        torch.testing.assert_close(model["first"].weight.grad, torch.full((5, 5), 2.0 / world_size))
        assert model["unused"].weight.grad is None and model["frozen"].weight.grad is None
    model["all"].weight.grad = torch.full((5, 5), float(rank))  # the user's own
    gradients.average()
    torch.testing.assert_close(model["all"].weight.grad, torch.full((5, 5), sum(range(world_size)) / world_size))


def test_share_gradients_unused_dtypes_layouts() -> None:
    run_ranks(_shared_options, 2)


def _shared_errors(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    horon.share_gradients(model)
    with pytest.raises(RuntimeError, match="create_graph"):
        model(torch.ones(2, 4)).square().sum().backward(create_graph=True)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"float64.*share_gradients\(\) again"):
        model.double()(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    sparse = nn.Embedding(4, 4, sparse=True)
    horon.share_gradients(sparse)
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        sparse(torch.tensor([1])).sum().backward()


def test_share_gradients_says_what_it_can_not_take() -> None:
    run_ranks(_shared_errors, 2)


def _fsdp(rank: int, world_size: int) -> None:
    plain, model = _model(), _model()
    for m in (plain, model):
        for layer in m:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(m)
    for module in model.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    used = horon.arena_statistics()["used_bytes"]
    peak = used
    handles = [
        layer.register_forward_hook(lambda *_: seen.append(horon.arena_statistics()["used_bytes"])) for layer in model
    ]
    seen: list[int] = []
    for step in range(3):
        for m in (plain, model):
            m.zero_grad()
            _loss(m, step, rank).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor())  # type: ignore[union-attr]
    peak = max(seen)
    for handle in handles:
        handle.remove()
    assert peak > used, "FSDP2 has not taken its buffers from the arena"
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    tensor = backend.allocate_tensor(100, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert horon.is_in_arena(tensor) and tensor.shape == (100,) and tensor.dtype == torch.bfloat16


def test_fsdp_takes_its_buffers_from_the_arena() -> None:
    run_ranks(_fsdp, 2)
