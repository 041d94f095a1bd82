"""DeviceMesh and DTensor: distribute, redistribute between all placements, matmul, tensor parallelism."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Cases, on_gloo, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def _mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]
    for name, members in (("rows", [rank % 2, rank % 2 + 2]), ("columns", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == BACKEND
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)


def test_two_dimensional_mesh() -> None:
    run_ranks(_mesh, 4)


def _redistribute(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    cases = Cases()
    for shape in ((8, 6), (7, 5), (1, 3)):  # Even, uneven, and fewer rows than ranks.
        whole = _whole(*shape)
        for source, target in product([Shard(0), Shard(1), Replicate()], repeat=2):
            with cases(f"{shape} {source} -> {target}"):
                distributed = distribute_tensor(whole, mesh, [source])
                assert torch.equal(distributed.full_tensor(), whole)
                assert torch.equal(distributed.redistribute(mesh, [target]).full_tensor(), whole)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_redistribute(world_size: int) -> None:
    run_ranks(_redistribute, world_size)


def _partial(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world_size,))
    cases = Cases()
    for op in ("sum", "max", "min") if on_gloo() else ("sum", "avg", "max", "min"):
        local = _whole(6, 4) * (rank + 1)
        everyone = torch.stack([_whole(6, 4) * (r + 1) for r in range(world_size)])
        expected = {"sum": everyone.sum(0), "avg": everyone.mean(0), "max": everyone.amax(0), "min": everyone.amin(0)}[
            op
        ]
        for target in (Replicate(), Shard(0), Shard(1)):
            with cases(f"partial {op} -> {target}"):
                tensor = DTensor.from_local(local, mesh, [Partial(op)])
                torch.testing.assert_close(tensor.redistribute(mesh, [target]).full_tensor(), expected)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_partial_is_reduced(world_size: int) -> None:
    run_ranks(_partial, world_size)


def _matmul(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    a, b = _whole(8, 12) / 50, _whole(12, 6) / 50
    cases = Cases()
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for pa, pb in product(placements, repeat=2):
        with cases(f"{pa} @ {pb}"):
            product_ = distribute_tensor(a, mesh, [pa]) @ distribute_tensor(b, mesh, [pb])
            torch.testing.assert_close(product_.full_tensor(), a @ b)
    cases.check()


@pytest.mark.parametrize("world_size", [2, 4])
def test_matmul(world_size: int) -> None:
    run_ranks(_matmul, world_size)


def _two_dimensions(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = _whole(8, 8)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        tensor = distribute_tensor(whole, mesh, placements)
        assert torch.equal(tensor.full_tensor(), whole), str(placements)
        moved = tensor.redistribute(mesh, [Replicate(), Shard(1)])
        assert torch.equal(moved.full_tensor(), whole), str(placements)


def test_two_dimensional_placements() -> None:
    run_ranks(_two_dimensions, 4)


def _tensor_parallel(rank: int, world_size: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    mesh = init_device_mesh("cpu", (world_size,))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    reference = build()
    x = _whole(5, 6) / 30
    output, expected = model(x), reference(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def test_tensor_parallel_layers() -> None:
    run_ranks(_tensor_parallel, 2)
