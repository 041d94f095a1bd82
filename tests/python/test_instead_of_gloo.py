"""HORON_INSTEAD_OF_GLOO=on: programs that ask for Gloo get horon, and find what they know of Gloo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horon
import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

ON = {"HORON_INSTEAD_OF_GLOO": "on"}
CPU = torch.device("cpu")


def _of_cpu(group: Any) -> Any:
    """The group's backend for CPU tensors, out of the wrapper that torch's debug mode puts around it."""
    backend = group._get_backend(CPU)
    return getattr(backend, "wrapped_pg", backend)


def _is_horon(group: Any) -> bool:
    from horon import _C

    return isinstance(_of_cpu(group), _C.HoronBackend)


def _what_programs_do(rank: int, world_size: int) -> None:
    assert _is_horon(dist.group.WORLD)
    assert dist.get_backend() == dist.Backend.GLOO == "gloo"
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(world_size))).all()
    dist.barrier()
    dist.monitored_barrier()  # in torch 2.13, for groups that are called "gloo" only
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, {"rank": rank})
    assert everyones == [{"rank": r} for r in range(world_size)]
    assert _is_horon(dist.init_device_mesh("cpu", (world_size,)).get_group())


def _groups(rank: int, world_size: int) -> None:
    gloos_options = dist.ProcessGroupGloo._Options()
    ways: list[dict[str, Any]] = [{}, {"backend": "gloo"}, {"backend": dist.Backend.GLOO}, {"backend": "cpu:gloo"}]
    for way in [*ways, {"backend": "gloo", "pg_options": gloos_options}]:
        group = dist.new_group(**way)
        assert _is_horon(group), way
        for sum_up in (torch.ones(3), torch.ones(100_000)):
            dist.all_reduce(sum_up, group=group)
            assert (sum_up == world_size).all(), way
    alone = dist.new_group([0], backend="gloo")
    assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (rank != 0)


def _sparse(rank: int, world_size: int) -> None:
    tensor = torch.sparse_coo_tensor([[rank]], [1.0], (world_size,))
    dist.all_reduce(tensor)
    assert (tensor.to_dense() == 1).all()
    model = DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)))
    model(torch.tensor([rank, 3])).sum().backward()
    assert model.module[0].weight.grad.is_sparse


def _arena(rank: int, world_size: int) -> None:
    model = horon.ddp_in_arena(DDP(nn.Linear(4, 1), gradient_as_bucket_view=True))
    model(torch.full((1, 4), float(rank))).sum().backward()
    assert horon.is_in_arena(model.module.weight.grad)
    assert (model.module.weight.grad == sum(range(world_size)) / world_size).all()


def _all(rank: int, world_size: int) -> None:
    _what_programs_do(rank, world_size)
    _groups(rank, world_size)
    _sparse(rank, world_size)
    _arena(rank, world_size)
    dist.destroy_process_group()


def test_what_asks_for_gloo_gets_horon() -> None:
    assert_clean_exits(run_fresh_processes(_all, 2, env=ON, backend="gloo", executed=True))


def _in_debug_mode(rank: int, world_size: int) -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    _what_programs_do(rank, world_size)
    dist.destroy_process_group()


def test_in_debug_mode() -> None:
    env = {**ON, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert_clean_exits(run_fresh_processes(_in_debug_mode, 2, env=env, backend="gloo", executed=True))


def _by_default(rank: int, world_size: int, path: str) -> None:
    store = dist.FileStore(path, world_size)
    dist.init_process_group(store=store, rank=rank, world_size=world_size)  # what a machine without a GPU gets
    assert _is_horon(dist.group.WORLD)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    assert (tensor == world_size).all()
    assert _is_horon(dist.new_group())
    model = DDP(nn.Linear(2, 1))  # its logger asks for the backend of the type that torch took for granted
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is NCCL")
def test_the_default_is_horon_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert_clean_exits(run_fresh_processes(_by_default, 2, path, env=ON, init=False, executed=True))


def _off(rank: int, world_size: int) -> None:
    assert isinstance(_of_cpu(dist.group.WORLD), dist.ProcessGroupGloo)
    assert _is_horon(dist.new_group(backend="horon"))
    dist.destroy_process_group()


@pytest.mark.parametrize("word", ["off", "0", ""])
def test_off(word: str) -> None:
    env = {"HORON_INSTEAD_OF_GLOO": word}
    assert_clean_exits(run_fresh_processes(_off, 1, env=env, backend="gloo", executed=True))


def _unknown_word(rank: int, world_size: int) -> None:
    def ask_gloo() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    expect_error(ask_gloo, "HORON_INSTEAD_OF_GLOO", "expected on or off", "'maybe'")
    dist.init_process_group("horon", store=dist.HashStore(), rank=0, world_size=1)
    assert _is_horon(dist.group.WORLD)
    dist.destroy_process_group()


def test_a_word_that_says_neither_is_an_error_of_the_groups() -> None:
    env = {"HORON_INSTEAD_OF_GLOO": "maybe"}
    assert_clean_exits(run_fresh_processes(_unknown_word, 1, env=env, init=False, executed=True))


def _options_of_others(rank: int, world_size: int) -> None:
    for foreign in (object(), SimpleNamespace(backend="nccl"), {}):
        group = dist.new_group(backend="gloo", pg_options=foreign)
        assert _is_horon(group)
        tensor = torch.sparse_coo_tensor([[0]], [1.0], (1,))
        dist.all_reduce(tensor, group=group)
        assert tensor.to_dense() == world_size
    expect_error(lambda: dist.new_group(backend="horon", pg_options=object()), "expected horon.Options")


def _another_plugin(rank: int, world_size: int) -> None:
    for name in ("cpu:gloo,cuda:fake", "cuda:fake,cpu:gloo"):
        expect_error(lambda name=name: dist.new_group(backend=name), "HORON_INSTEAD_OF_GLOO", name, "Unset")
    dist.all_reduce(torch.ones(3))
    assert dist.Backend.GLOO == "gloo" and dist.Backend("gloo") == dist.Backend.GLOO
    assert dist.BackendConfig(dist.Backend("gloo")).get_device_backend_map()["cpu"] == "gloo"


def _odd_groups(rank: int, world_size: int) -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake" before torch 2.15)

    _options_of_others(rank, world_size)
    _another_plugin(rank, world_size)
    dist.destroy_process_group()


def test_options_of_others_have_no_effect_and_another_plugin_is_an_error() -> None:
    assert_clean_exits(run_fresh_processes(_odd_groups, 1, env=ON, backend="gloo", executed=True))
