"""One group for CPU and CUDA tensors, several groups at once, split groups, object collectives."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from gpu_harness import group_backend, on_nccl, on_simulator, run_ranks
from gpu_tensors import DEVICE, all_inputs, check_equal, check_reduced, make_input, on_cpu, on_gpu, output
from harness import TORCH_VERSION, Cases

RANKS = [1, 2, 4]


def _sum_is_right(rank: int, n: int, group: dist.ProcessGroup | None = None, members: list[int] | None = None) -> None:
    members = list(range(n)) if members is None else members
    tensor = on_gpu(make_input(rank, 1001, torch.float32))
    dist.all_reduce(tensor, group=group)
    check_reduced(tensor, [make_input(r, 1001, torch.float32) for r in members], "SUM")


def _mixed(rank: int, n: int) -> None:
    """CPU and CUDA operations in flight together, issued in the same order everywhere and waited for in another."""
    devices = ["cpu", "cuda", "cuda", "cpu", "cuda", "cpu", "cpu", "cuda"]
    tensors = [make_input(rank, 100 + 3000 * i, torch.float32, seed=i) for i in range(len(devices))]
    tensors = [
        tensor.to(DEVICE if device == "cuda" else "cpu") for tensor, device in zip(tensors, devices, strict=True)
    ]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        check_reduced(tensor, all_inputs(n, 100 + 3000 * i, torch.float32, seed=i), "SUM")
    for device in ("cpu", DEVICE):
        gathered = [torch.empty(7).to(device) for _ in range(n)]
        dist.all_gather(gathered, make_input(rank, 7, torch.float32).to(device))
        for r in range(n):
            check_equal(gathered[r], make_input(r, 7, torch.float32))


@pytest.mark.parametrize("n", RANKS)
def test_cpu_and_cuda_tensors_in_one_group(n: int) -> None:
    if on_nccl() and on_simulator():
        pytest.skip("nccl: flattens lists by kernels")
    run_ranks(_mixed, n)


def _objects(rank: int, n: int) -> None:
    cases = Cases()
    value = {"rank": rank, "text": "x" * (10 + 1000 * rank)}
    with cases("all_gather_object"):
        found: list[object] = [None] * n
        dist.all_gather_object(found, value)
        assert [one["rank"] for one in found] == list(range(n))  # type: ignore[index]
        assert [len(one["text"]) for one in found] == [10 + 1000 * r for r in range(n)]  # type: ignore[index]
    with cases("broadcast_object_list"):
        objects = [value, rank] if rank == n - 1 else [None, None]
        dist.broadcast_object_list(objects, n - 1)
        assert objects[0]["rank"] == n - 1 and objects[1] == n - 1  # type: ignore[index]
    with cases("gather_object"):
        gathered = [None] * n if rank == 0 else None
        dist.gather_object(value, gathered, 0)
        assert gathered is None or [one["rank"] for one in gathered] == list(range(n))
    with cases("scatter_object_list"):
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None, 0)
        assert mine == [f"for {rank}"]
    with cases("a CUDA tensor within an object"):
        tensors: list[object] = [None] * n
        dist.all_gather_object(tensors, on_gpu(make_input(rank, 5, torch.float32)))
        for r, tensor in enumerate(tensors):
            assert isinstance(tensor, torch.Tensor) and tensor.is_cuda
            check_equal(tensor, make_input(r, 5, torch.float32))
    with cases("on the GPU, as asked for"):
        if not on_simulator():
            objects = [value] if rank == 0 else [None]
            dist.broadcast_object_list(objects, 0, device=DEVICE)
            assert objects[0]["rank"] == 0  # type: ignore[index]
    cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_object_collectives(n: int) -> None:
    run_ranks(_objects, n)


def _new_groups(rank: int, n: int) -> None:
    _sum_is_right(rank, n)
    halves = [list(range(0, n, 2)), list(range(1, n, 2))]
    groups = [dist.new_group(members, backend=group_backend()) for members in halves if members]
    for group, members in zip(groups, halves, strict=False):
        if rank in members:
            _sum_is_right(rank, n, group, members)
    everyone = dist.new_group(list(range(n)))
    _sum_is_right(rank, n, everyone)
    _sum_is_right(rank, n)
    mine = rank % 2
    if halves[mine]:
        tensor = on_gpu(make_input(rank, 10, torch.float32))
        dist.broadcast(tensor, halves[mine][-1], group=groups[mine])
        check_equal(tensor, make_input(halves[mine][-1], 10, torch.float32))
    dist.destroy_process_group(everyone)
    _sum_is_right(rank, n)


@pytest.mark.parametrize("n", RANKS)
def test_new_group(n: int) -> None:
    run_ranks(_new_groups, n)


def _split(rank: int, n: int, init_store: str) -> None:
    arguments = {"init_method": f"file://{init_store}", "rank": rank, "world_size": n}
    dist.init_process_group(group_backend(), device_id=DEVICE, **arguments)
    _sum_is_right(rank, n)
    members = [[0, 1], [2, 3]]
    group = dist.split_group(split_ranks=members)
    mine = members[rank // 2]
    assert group.size() == 2 and group.rank() == rank % 2
    _sum_is_right(rank, n, group, mine)
    again = dist.split_group(split_ranks=[[0, 1, 2]])
    if rank < 3:
        _sum_is_right(rank, n, again, [0, 1, 2])
    _sum_is_right(rank, n)
    assert dist.get_backend(group) == dist.get_backend() or on_nccl()


def test_split_group(tmp_path: object) -> None:
    if on_nccl() and TORCH_VERSION < (2, 13):
        pytest.skip("nccl: splits no group that has a CPU side, in this version")
    run_ranks(_split, 4, f"{tmp_path}/store", init=False)


def _eager(rank: int, n: int, init_store: str) -> None:
    """With device_id the communicator may be made at once."""
    arguments = {"init_method": f"file://{init_store}", "rank": rank, "world_size": n}
    dist.init_process_group(group_backend(), device_id=DEVICE, **arguments)
    _sum_is_right(rank, n)
    group = dist.new_group(list(range(n)), device_id=DEVICE) if TORCH_VERSION >= (2, 7) else dist.new_group()
    _sum_is_right(rank, n, group)
    dist.barrier()
    dist.barrier(device_ids=[0])


@pytest.mark.parametrize("n", RANKS)
def test_bound_to_a_device(n: int, tmp_path: object) -> None:
    if on_nccl() and on_simulator():
        pytest.skip("nccl: its barrier makes a tensor by a kernel")
    run_ranks(_eager, n, f"{tmp_path}/store", init=False)


def _several(rank: int, n: int) -> None:
    """Operations of several groups in flight together, issued in one order on all ranks."""
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
    for group in groups:
        _sum_is_right(rank, n, group)
    tensors = [on_gpu(make_input(rank, 5000 + i, torch.float32, seed=i)) for i in range(40)]
    works = [dist.all_reduce(tensor, group=groups[i % 4], async_op=True) for i, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        check_reduced(tensor, all_inputs(n, 5000 + i, torch.float32, seed=i), "SUM")


@pytest.mark.parametrize("n", [1, 2])
def test_several_groups_at_once(n: int) -> None:
    run_ranks(_several, n)


def _threads(rank: int, n: int) -> None:
    """A thread with a group of its own, on a stream of its own, beside the main thread."""
    other = dist.new_group()
    _sum_is_right(rank, n, other)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    _sum_is_right(rank, n, other)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for i in range(20):
        tensor = make_input(rank, 1000 + i, torch.float32)
        dist.all_reduce(tensor)
        check_reduced(tensor, all_inputs(n, 1000 + i, torch.float32), "SUM")
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_group_in_another_thread(n: int) -> None:
    run_ranks(_threads, n)


def _again_and_again(rank: int, n: int, store_prefix: str) -> None:
    """Groups are made and destroyed many times; memory of the GPU comes back."""
    before = None
    for turn in range(6):
        arguments = {"init_method": f"file://{store_prefix}-{turn}", "rank": rank, "world_size": n}
        dist.init_process_group(group_backend(), **arguments)
        _sum_is_right(rank, n)
        dist.destroy_process_group()
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        if turn == 1:
            before = free
    if not on_simulator() and n == 1:
        assert before is not None and before - free < 256 << 20, f"{(before - free) >> 20} MiB have not come back"
    assert on_cpu(output(3, torch.float32)).numel() == 3


@pytest.mark.parametrize("n", [1, 2])
def test_groups_made_and_destroyed_again_and_again(n: int, tmp_path: object) -> None:
    run_ranks(_again_and_again, n, f"{tmp_path}/store", init=False)


@pytest.mark.horon_only
@pytest.mark.parametrize("n", [1, 2])
def test_functional_collectives(n: int) -> None:
    run_ranks(_functional, n)


def _functional(rank: int, n: int) -> None:
    import torch.distributed._functional_collectives as functional

    mine = on_gpu(make_input(rank, 12, torch.float32))
    group = dist.group.WORLD
    found = functional.wait_tensor(functional.all_gather_tensor(mine, 0, group))
    check_equal(found, torch.cat(all_inputs(n, 12, torch.float32)))
    if not on_simulator():
        found = functional.wait_tensor(functional.all_reduce(mine, "sum", group))
        check_reduced(found, all_inputs(n, 12, torch.float32), "SUM")
