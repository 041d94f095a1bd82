"""What can not work is an error that says why, on the caller, and the group works on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_harness import on_nccl, on_simulator, run_ranks
from gpu_tensors import DEVICE, all_inputs, check_reduced, make_input, on_gpu, output
from harness import Cases, expect_error


def _works(rank: int, n: int) -> None:
    tensor = on_gpu(make_input(rank, 5, torch.float32))
    dist.all_reduce(tensor)
    check_reduced(tensor, all_inputs(n, 5, torch.float32), "SUM")


def _bad(rank: int, n: int) -> None:
    _works(rank, n)
    cases = Cases()
    a = on_gpu(torch.ones(4))
    calls = {
        "sparse": lambda: dist.all_reduce(torch.eye(3).to_sparse().to(DEVICE)),
        "output too small": lambda: dist.all_gather_into_tensor(output(n * 4 - 1, torch.float32), a),
        "input too small": lambda: dist.reduce_scatter_tensor(output(4, torch.float32), on_gpu(torch.ones(n * 4 + 1))),
        "dtypes differ": lambda: dist.all_gather_into_tensor(output(n * 4, torch.float16), a),
        "too few in the list": lambda: dist.all_gather([on_gpu(torch.ones(4)) for _ in range(n + 1)], a),
        "splits that do not add up": lambda: dist.all_to_all_single(output(4, torch.float32), a, [4] * n, [5] * n),
        "other sizes than it sends": lambda: dist.all_to_all_single(
            output(3 * n, torch.float32), on_gpu(torch.ones(4 * n))
        ),
        "CPU output of a CUDA input": lambda: dist.all_gather_into_tensor(torch.ones(n * 4), a),
        "CUDA output of a CPU input": lambda: dist.all_gather_into_tensor(output(n * 4, torch.float32), torch.ones(4)),
        "root that is none": lambda: dist.broadcast(a, n + 3),
        "mixed list": lambda: dist.all_gather([torch.ones(4)] + [on_gpu(torch.ones(4)) for _ in range(n - 1)], a),
    }
    for name, call in calls.items():
        if on_nccl() and name in ("CPU output of a CUDA input", "CUDA output of a CPU input", "mixed list"):
            continue
        if on_simulator() and name == "sparse":
            continue  # Making one takes kernels.
        if n == 1 and name == "mixed list":
            continue
        with cases(name):
            expect_error(call)
    with cases("the group works on"):
        _works(rank, n)
    cases.check()


@pytest.mark.horon_only
@pytest.mark.parametrize("n", [1, 2])
def test_bad_input(n: int) -> None:
    run_ranks(_bad, n)


def _overlapping(rank: int, n: int) -> None:
    overlapping = on_gpu(torch.arange(8.0)).as_strided((4, 4), (1, 1))
    expect_error(lambda: dist.all_reduce(overlapping))
    _works(rank, n)


@pytest.mark.needs_kernels
@pytest.mark.horon_only
def test_overlapping_views() -> None:
    run_ranks(_overlapping, 1)


def _two_devices(rank: int, n: int) -> None:
    here, there = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    expect_error(lambda: dist.group.WORLD.allreduce_coalesced([here, there], options), "device")
    expect_error(lambda: dist.all_gather_into_tensor(torch.ones(4 * n, device="cuda:1"), here), "device")
    _works(rank, n)


@pytest.mark.horon_only
def test_tensors_on_different_devices() -> None:
    if not on_simulator() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if on_simulator():
        pytest.skip("simulator: ones() on a device takes a kernel")
    run_ranks(_two_devices, 1)


def _device_types(rank: int, n: int) -> None:
    """The same on one GPU: a CPU and a CUDA tensor in one coalesced call."""
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    mixed = [on_gpu(torch.ones(4)), torch.ones(4)]
    message = expect_error(lambda: dist.group.WORLD.allreduce_coalesced(mixed, options), "device")
    assert "cuda" in message.lower() and "cpu" in message.lower(), message
    _works(rank, n)


@pytest.mark.horon_only
def test_cpu_and_cuda_tensors_in_one_call() -> None:
    run_ranks(_device_types, 1)


def _after_destroy(rank: int, n: int) -> None:
    _works(rank, n)
    group = dist.group.WORLD
    dist.destroy_process_group()
    expect_error(lambda: dist.all_reduce(on_gpu(torch.ones(3))))
    expect_error(lambda: group.allreduce([on_gpu(torch.ones(3))]).wait())


@pytest.mark.horon_only
@pytest.mark.parametrize("n", [1, 2])
def test_use_after_destroy(n: int) -> None:
    run_ranks(_after_destroy, n)
