"""c10d operations where a process has several GPUs, on simulated ones whose queues run late; and barriers.

What is right on one GPU is in test_cuda_group.py and tests/gpu.
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_simulator import CudaSimulator, needs_gpu_parts
from harness import Cases, expect_error

pytestmark = needs_gpu_parts

LATE = {"HORON_SIMULATOR_DELAY_US": "400"}
TWO_DEVICES = {**LATE, "HORON_SIMULATOR_DEVICES": "2"}
CYCLES_PER_MS = 1.98e6  # of the simulated clock


def _on(device: int, values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(f"cuda:{device}")


def _keep_busy(device: int, ms: float) -> torch.cuda.Event:
    """Something long on a device's current stream, and the event after it."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))
        event = torch.cuda.Event()
        event.record()
    return event


def _collectives(device: int, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    total, after, before = sum(range(size)), (rank + 1) % size, (rank - 1) % size
    for async_op in (False, True):
        tensor = _on(device, [rank, 1.0])
        work = dist.all_reduce(tensor, async_op=async_op, group=group)
        if async_op:
            assert work.get_future().wait()[0].device == tensor.device
            work.wait()
        assert tensor.device.index == device
        assert tensor.cpu().tolist() == [total, size]
    whole = _on(device, [0.0] * size)
    dist.all_gather_into_tensor(whole, _on(device, [rank]), group=group)
    assert whole.cpu().tolist() == list(range(size))
    mine = _on(device, [0.0])
    dist.reduce_scatter_tensor(mine, _on(device, [float(i) for i in range(size)]), group=group)
    assert mine.cpu().item() == rank * size
    exchanged = _on(device, [0.0] * size)
    dist.all_to_all_single(exchanged, _on(device, [rank * 10.0 + i for i in range(size)]), group=group)
    assert exchanged.cpu().tolist() == [peer * 10.0 + rank for peer in range(size)]
    sent = _on(device, [rank])
    dist.broadcast(sent, size - 1, group=group)
    assert sent.cpu().item() == size - 1
    received = _on(device, [-1.0])
    operations = [
        dist.P2POp(dist.isend, _on(device, [float(rank)]), after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.cpu().item() == before
    fused = [_on(device, [float(rank + i)] * (i + 1)) for i in range(10)]
    with dist._coalescing_manager(group, async_ops=True, device=torch.device("cuda", device)) as manager:
        for tensor in fused:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert [tensor.cpu().tolist() for tensor in fused] == [[float(total + size * i)] * (i + 1) for i in range(10)]


def _several_devices(rank: int, size: int) -> None:
    """Devices of different ranks belong together in the order of their first use: their numbers differ."""
    first, second = devices = (rank % 2, 1 - rank % 2)
    cases = Cases()
    with cases("one device of each rank, and then the other one, in one group"):
        for device in devices:
            _collectives(device, rank, size)
    with cases("both devices in turns, without a wait between them"):
        tensors = [_on(devices[i % 2], [float(rank + i)] * 100) for i in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        for i, tensor in enumerate(tensors):
            assert tensor.cpu().tolist() == [float(sum(range(size)) + size * i)] * 100
    with cases("a group for each device"):
        groups = [dist.new_group() for _ in range(2)]
        for group, device in zip(groups, devices, strict=True):
            _collectives(device, rank, size, group)
    with cases("the current device stays what it was"):
        for current, other in (devices, devices[::-1]):
            torch.cuda.set_device(current)
            dist.all_reduce(_on(other, [1.0]))
            dist.all_reduce(_on(other, [1.0]), async_op=True).wait()
            dist.barrier()
            assert torch.cuda.current_device() == current
    with cases("a busy device does not hold up the other one"):
        dist.barrier()
        busy = _keep_busy(second, ms=3500)
        tensor = _on(first, [1.0])
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor.cpu().item() == size
        assert not busy.query()
        dist.barrier()
        assert busy.query(), "the group has used this device, and the barrier did not wait for it"
    with cases("tensors of both in one call"):
        both = [_on(device, [1.0]) for device in (0, 1)]
        expect_error(lambda: dist.all_reduce_coalesced(both), "ValueError", "cuda:0", "cuda:1")
        expect_error(lambda: dist.all_gather_into_tensor(_on(1, [0.0] * size), _on(0, [1.0])), "ValueError", "cuda:1")
        _collectives(second, rank, size)
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_devices_in_one_process(cuda_simulator: CudaSimulator, world_size: int) -> None:
    cuda_simulator.run(_several_devices, world_size, backend="horon", env=TWO_DEVICES)


def _barriers(rank: int, size: int) -> None:
    cases = Cases()
    with cases("before the process uses a GPU: none is begun with"):
        dist.barrier()
        dist.barrier(device_ids=[1])
        assert not torch.cuda.is_initialized()
    with cases("of a group that never used a GPU: the current one"):
        elsewhere = torch.ones(1).to("cuda:1")
        event = _keep_busy(0, ms=200)
        dist.barrier()
        assert event.query()
    with cases("device_ids"):
        event = _keep_busy(1, ms=200)
        dist.barrier(device_ids=[1])
        assert event.query()
        assert elsewhere.device.index == 1
        expect_error(lambda: dist.barrier(device_ids=[2]), "invalid device ordinal")  # torch's own
        expect_error(lambda: dist.barrier(device_ids=[0, 2]), "ValueError", "device_ids", "from 0 to 1, got 2")
    with cases("a GPU that does not come to its end in time"):
        options = dist.BarrierOptions()
        options.timeout = datetime.timedelta(milliseconds=200)
        event = _keep_busy(0, ms=3500)  # longer than a rank may be kept from its core
        expect_error(lambda: dist.group.WORLD.barrier(options).wait(), "Timed out waiting 200ms", "GPU")
        event.synchronize()
        dist.barrier()
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2])
def test_barriers(cuda_simulator: CudaSimulator, world_size: int) -> None:
    cuda_simulator.run(_barriers, world_size, backend="horon", env=TWO_DEVICES)
