"""c10d operations on CUDA tensors, on simulated GPUs whose queues run late: the ways through CudaGroup.

The whole suite is tests/gpu, which runs on the simulator, too (HORON_GPU_TESTS_ON_SIMULATOR=1). Here: what a change of
torch_backend is most likely to break, and the batching of separate calls.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from cuda_simulator import CudaSimulator, needs_gpu_parts
from harness import Cases, assert_clean_exits, expect_error

if TYPE_CHECKING:
    import torch

pytestmark = needs_gpu_parts

LATE = {"HORON_SIMULATOR_DELAY_US": "400"}


def _cuda(values: Any) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32).to("cuda")


def _run(simulator: CudaSimulator, fn: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return simulator.run(fn, world_size, *args, backend="horon", env={**LATE, **options.pop("env", {})}, **options)


def _collectives(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    cases = Cases()
    total = sum(range(size))
    with cases("all_reduce, both ways"):
        for async_op in (False, True):
            tensor = _cuda([rank, 1.0])
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
            assert tensor.cpu().tolist() == [total, size]
    with cases("an input that the GPU has yet to write"):
        source = torch.full((1000,), 5.0).pin_memory()
        tensor = torch.empty(1000, device="cuda")
        torch.cuda._sleep(int(20 * 1.98e6))  # 20 ms at the simulated clock rate
        tensor.copy_(source, non_blocking=True)
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor.cpu().tolist() == [5.0 * size] * 1000
    with cases("tensors that are dropped at once"):
        for value in range(100):
            dropped = _cuda([float(value)] * 500)
            kept = dropped
            work = dist.all_reduce(dropped, async_op=True)
            del dropped
            _cuda([-1.0] * 500)  # takes the memory, if it is free too early
        torch.cuda.synchronize()
        work.wait()
        assert kept.cpu().tolist() == [99.0 * size] * 500
    with cases("all_gather in a list and in one tensor"):
        gathered = [_cuda([0.0, 0.0]) for _ in range(size)]
        dist.all_gather(gathered, _cuda([rank, rank + 0.5]))
        whole = _cuda([0.0] * 2 * size)
        dist.all_gather_into_tensor(whole, _cuda([rank, rank + 0.5]))
        expected = [value for peer in range(size) for value in (peer, peer + 0.5)]
        assert torch.cat([tensor.cpu() for tensor in gathered]).tolist() == expected
        assert whole.cpu().tolist() == expected
    with cases("coalesced, fused and mixed with other kinds"):
        tensors = [_cuda([float(rank + index)] * (index + 1)) for index in range(40)]
        sent = _cuda([float(rank)])
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        dist.broadcast(sent, size - 1)
        for index, tensor in enumerate(tensors):
            assert tensor.cpu().tolist() == [float(total + size * index)] * (index + 1)
        assert sent.cpu().item() == size - 1
    with cases("a ring in one batch, CPU and GPU together"):
        received, on_cpu = _cuda([-1.0]), torch.full((1,), -1.0)
        after, before = (rank + 1) % size, (rank - 1) % size
        operations = [
            dist.P2POp(dist.isend, _cuda([float(rank)]), after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.cpu().item() == before
        dist.all_reduce(on_cpu)
        assert on_cpu.item() == -size
    with cases("futures"):
        work = dist.all_reduce(_cuda([1.0]), async_op=True)
        assert work.get_future().then(lambda done: done.value()[0].cpu().item()).wait() == size
    with cases("bad input leaves the group usable"):
        expect_error(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16).to("cuda")), "ValueError", "int16")
        expect_error(lambda: dist.all_gather([torch.zeros(1)] * size, _cuda([1.0])), "ValueError", "cpu")
        tensor = _cuda([1.0])
        dist.all_reduce(tensor)
        dist.barrier()
        assert tensor.cpu().item() == size
    cases.check()


@pytest.mark.parametrize("blocking", ["1", "0"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(cuda_simulator: CudaSimulator, world_size: int, blocking: str) -> None:
    _run(cuda_simulator, _collectives, world_size, env={"HORON_NCCL_BLOCKING": blocking})


def _bad_setting(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    expect_error(lambda: dist.all_reduce(_cuda([1.0])), "ValueError", "HORON_NCCL_BLOCKING: expected 0 or 1, got 'no'")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def test_a_setting_that_is_none_is_refused_and_the_cpu_goes_on(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _bad_setting, 2, env={"HORON_NCCL_BLOCKING": "no"})


def _batched(rank: int, size: int) -> None:
    import torch.distributed as dist

    choice = random.Random(rank)
    for _ in range(2):
        tensors = [_cuda([float(rank + index)] * (index % 7 + 1)) for index in range(40)]
        works = []
        for index, tensor in enumerate(tensors):
            works.append(dist.all_reduce(tensor, async_op=True))
            if choice.random() < 0.2:
                choice.choice(works).wait()  # ranks wait at different places
            if index == 20:
                other = _cuda([float(rank)])
                dist.broadcast(other, size - 1)  # behind what was batched
                assert other.cpu().item() == size - 1
            if index == 25:
                dist.all_reduce(tensors[3])
            if index == 30:
                large = _cuda([1.0] * 20_000)
                dist.all_reduce(large, async_op=True).wait()
                assert large.cpu().tolist() == [float(size)] * 20_000
        for work in works:
            work.wait()
        for index, tensor in enumerate(tensors):
            value = sum(peer + index for peer in range(size)) * (size if index == 3 else 1)
            assert tensor.cpu().tolist() == [float(value)] * (index % 7 + 1), index
    turned = _cuda([[1.0, 2.0], [3.0, 4.0]]).t()
    dist.all_reduce(turned, async_op=True).wait()
    assert turned.cpu().tolist() == [[1.0 * size, 3.0 * size], [2.0 * size, 4.0 * size]]
    work = dist.all_reduce(_cuda([1.0]), async_op=True)
    assert work.get_future().wait()[0].cpu().item() == size
    for _ in range(300):  # more than there are names
        work = dist.all_reduce(_cuda([1.0, 2.0]), async_op=True)
    work.wait()
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_separate_calls_travel_together_where_options_ask_for_it(
    cuda_simulator: CudaSimulator, world_size: int
) -> None:
    _run(cuda_simulator, _batched, world_size, env={"HORON_CUDA_BATCH_BYTES": "65536"})


def _peer_ends(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(_cuda([1.0]))
    torch.cuda.synchronize()
    if rank == size - 1:
        os._exit(7)

    def until_it_fails() -> None:
        while True:
            dist.all_reduce(_cuda([1.0]))
            torch.cuda.synchronize()

    expect_error(until_it_fails, f"rank {size - 1}", within_s=10)
    os._exit(0)  # the group is over, and the interpreter's end is not what is tested


@pytest.mark.parametrize("batch_bytes", ["0", "65536"])
def test_a_rank_that_ends_is_named(cuda_simulator: CudaSimulator, batch_bytes: str) -> None:
    env = {**LATE, "HORON_CUDA_BATCH_BYTES": batch_bytes}
    assert_clean_exits(cuda_simulator.outcomes(_peer_ends, 2, backend="horon", env=env, timeout=60), [0, 7])
