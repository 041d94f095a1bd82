"""DDP, FSDP2 and DTensor on CUDA tensors: what is trained equals what one process trains on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_harness import run_ranks
from gpu_tensors import DEVICE, on_cpu
from harness import Cases
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.needs_kernels

STEPS, BATCH = 4, 16


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def _batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 20, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (BATCH,), generator=generator)
    size = BATCH // parts
    return x[part * size : (part + 1) * size], y[part * size : (part + 1) * size]


def _train(model: nn.Module, part: int, parts: int, device: torch.device | str, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = (tensor.to(device) for tensor in _batch(step, part, parts))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _reference(steps: int = STEPS) -> list[torch.Tensor]:
    model = _model()
    _train(model, 0, 1, "cpu", steps)
    return [p.detach() for p in model.parameters()]


def _close(model: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-7) -> None:
    for index, (parameter, wanted) in enumerate(zip(model.parameters(), expected, strict=True)):
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(
            on_cpu(found).double(),
            wanted.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, i=index: f"parameter {i}: {text}",
        )


def _same_on_all_ranks(model: nn.Module, n: int) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gathered = torch.empty(n, flat.numel(), dtype=flat.dtype, device=flat.device)
    dist.all_gather_into_tensor(gathered, flat)
    assert all(torch.equal(one, gathered[0]) for one in gathered), "the ranks' parameters differ"


DDP_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.005},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "all of it": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    "unused": {"find_unused_parameters": True},
}


def _ddp(rank: int, n: int) -> None:
    cases = Cases()
    expected = _reference()
    for name, options in DDP_OPTIONS.items():
        with cases(name):
            model = _model().to(DEVICE)
            if rank > 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(rank)  # The constructor must broadcast rank 0's.
            model = DDP(model, device_ids=[0], **options)  # type: ignore[arg-type]
            _train(model, rank, n, DEVICE)
            _close(model, expected)
            _same_on_all_ranks(model, n)
    cases.check()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ddp(n: int) -> None:
    run_ranks(_ddp, n)


def _allreduce_and_scale(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
    """A hook that computes in its callback, on the future's stream."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))


def _hooks(rank: int, n: int) -> None:
    cases = Cases()
    hooks: dict[str, tuple[Callable[[], object], Callable[..., object], float]] = {
        "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-7),
        "own, which scales": (lambda: None, _allreduce_and_scale, 1e-7),
        "fp16": (lambda: None, default_hooks.fp16_compress_hook, 5e-3),
        "bf16": (lambda: None, default_hooks.bf16_compress_hook, 3e-2),
    }
    for name, (state, hook, tolerance) in hooks.items():
        with cases(name):
            model = DDP(_model().to(DEVICE), device_ids=[0], bucket_cap_mb=0.01)
            model.register_comm_hook(state(), hook)  # type: ignore[arg-type]
            _train(model, rank, n, DEVICE)
            _close(model, _reference(), tolerance)
            _same_on_all_ranks(model, n)
    with cases("PowerSGD"):
        model = DDP(_model().float().to(DEVICE), device_ids=[0])
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (tensor.to(DEVICE) for tensor in _batch(0, rank, n))
        for _ in range(12):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.float()), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        _same_on_all_ranks(model, n)
    cases.check()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ddp_communication_hooks(n: int) -> None:
    run_ranks(_hooks, n)


def _no_sync(rank: int, n: int) -> None:
    reference = _model()
    model = DDP(_model().to(DEVICE), device_ids=[0])
    for micro in range(3):
        x, y = _batch(micro)
        nn.functional.cross_entropy(reference(x), y).backward()
        x, y = (tensor.to(DEVICE) for tensor in _batch(micro, rank, n))
        if micro < 2:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), y).backward()
        else:
            nn.functional.cross_entropy(model(x), y).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(on_cpu(ours.grad), theirs.grad, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("n", [1, 2])
def test_ddp_no_sync(n: int) -> None:
    run_ranks(_no_sync, n)


def _sync_batch_norm(rank: int, n: int) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    reference = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    reference.load_state_dict(plain.state_dict())
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(plain).to(DEVICE), device_ids=[0])
    _train(model, rank, n, DEVICE)
    _train(reference, 0, 1, "cpu")
    _close(model, [p.detach() for p in reference.parameters()], 1e-6)


@pytest.mark.parametrize("n", [2])
def test_ddp_with_sync_batch_norm(n: int) -> None:
    run_ranks(_sync_batch_norm, n)


def _fsdp(rank: int, n: int, rows: int) -> None:
    cases = Cases()
    if rows == 1:
        mesh = init_device_mesh("cuda", (n,))
    else:
        mesh = init_device_mesh("cuda", (rows, n // rows), mesh_dim_names=("replicate", "shard"))
    with cases("training"):
        model = _model().to(DEVICE)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _train(model, rank, n, DEVICE)
        _close(model, _reference())
    with cases("bfloat16 with float32 reductions"):
        model = _model().float().to(DEVICE)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        _train(model, rank, n, DEVICE)
        _close(model, _reference(), 5e-2)
    with cases("a factor of its own, which is PREMUL_SUM"):
        model = _model().to(DEVICE)
        fully_shard(model, mesh=mesh)
        factor = 2.0 if n > 1 else 1.0  # With one rank there is nothing to reduce, and FSDP divides by nothing.
        model.set_gradient_divide_factor(factor * n)
        x, y = (tensor.to(DEVICE) for tensor in _batch(0, rank, n))
        nn.functional.cross_entropy(model(x), y).backward()
        reference = _model()
        nn.functional.cross_entropy(reference(_batch(0)[0]), _batch(0)[1]).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(on_cpu(ours.grad.full_tensor()), theirs.grad / factor, rtol=1e-7, atol=1e-7)
    cases.check()


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (2, 1), (4, 1), (4, 2)], ids=["1", "2", "4", "2 x 2"])
def test_fsdp2(n: int, rows: int) -> None:
    run_ranks(_fsdp, n, rows)


def _dtensor(rank: int, n: int) -> None:
    cases = Cases()
    mesh = init_device_mesh("cuda", (n,))
    for shape in ((8, 6), (7, 5), (1, 3)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for source in (Shard(0), Shard(1), Replicate()):
            for target in (Shard(0), Shard(1), Replicate()):
                with cases(f"{shape} {source} -> {target}"):
                    distributed = distribute_tensor(whole.to(DEVICE), mesh, [source])
                    assert torch.equal(on_cpu(distributed.redistribute(mesh, [target]).full_tensor()), whole)
    with cases("matmul of shards"):
        left, right = torch.randn(8, 12, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
        left, right = left.to(DEVICE), right.to(DEVICE)
        dist.broadcast(left, 0)
        dist.broadcast(right, 0)
        product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
        torch.testing.assert_close(on_cpu(product.full_tensor()), on_cpu(left) @ on_cpu(right))
    with cases("tensor parallelism"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        x = torch.randn(5, 8, dtype=torch.float64)
        expected = model(x)
        parallel = parallelize_module(model.to(DEVICE), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(on_cpu(parallel(x.to(DEVICE))), expected.detach())
    cases.check()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_dtensor(n: int) -> None:
    run_ranks(_dtensor, n)
