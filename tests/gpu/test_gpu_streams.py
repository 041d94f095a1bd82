"""Streams, events, futures and memory: operations are ordered by the GPU, and never block the host.

What a missing event would break shows as wrong data. Nothing here asserts on times: whether the GPU has finished is
asked of an event, and a peer that has not come yet, or a kernel that only waits, keeps it from finishing.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_harness import run_ranks
from gpu_tensors import DEVICE, all_inputs, check_equal, check_reduced, make_input, on_cpu, on_gpu, output
from harness import Cases, store

COUNT = 100_003
SLEEP_CYCLES = 1_000_000_000
"""Of the GPU's clock: half a second and more."""


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


def _side_streams(rank: int, n: int, is_async: bool) -> None:
    """Copy in, operation and copy out on a stream of the caller's, without a synchronization in between."""
    cases = Cases()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(12):
        with cases(f"turn {turn}"):
            stream = streams[turn % 3]
            source = _pinned(make_input(rank, COUNT, torch.float32, seed=turn))
            result = _pinned(torch.zeros(COUNT))
            tensor = torch.empty(COUNT, device=DEVICE)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                tensor.copy_(source, non_blocking=True)
                work = dist.all_reduce(tensor, async_op=is_async)
                if work is not None:
                    work.wait()
                result.copy_(tensor, non_blocking=True)
            stream.synchronize()
            check_reduced(result, all_inputs(n, COUNT, torch.float32, seed=turn), "SUM")
    cases.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_side_streams(n: int, is_async: bool) -> None:
    run_ranks(_side_streams, n, is_async)


def _waited_on_another_stream(rank: int, n: int) -> None:
    """The stream that is current at wait() is the one that waits."""
    issuing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(8):
        source = _pinned(make_input(rank, COUNT, torch.float32, seed=turn))
        result = _pinned(torch.zeros(COUNT))
        with torch.cuda.stream(issuing):
            tensor = torch.empty(COUNT, device=DEVICE)
            tensor.copy_(source, non_blocking=True)
            work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(reading):
            work.wait()
            result.copy_(tensor, non_blocking=True)
        reading.synchronize()
        check_reduced(result, all_inputs(n, COUNT, torch.float32, seed=turn), "SUM")


@pytest.mark.parametrize("n", [1, 2])
def test_wait_orders_the_stream_that_is_current(n: int) -> None:
    run_ranks(_waited_on_another_stream, n)


def _many_in_flight(rank: int, n: int) -> None:
    tensors = [on_gpu(make_input(rank, 1000 + i, torch.float32, seed=i)) for i in range(64)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        check_reduced(tensor, all_inputs(n, 1000 + i, torch.float32, seed=i), "SUM")
    torch.cuda.synchronize()
    assert all(work.is_completed() for work in works)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_many_in_flight(n: int) -> None:
    run_ranks(_many_in_flight, n)


def _inputs_dropped(rank: int, n: int, drop_work: bool) -> None:
    """The input is dropped right after the call, and its memory is asked for again and overwritten."""
    cases = Cases()
    for turn in range(10):
        with cases(f"turn {turn}"):
            found = output(COUNT, torch.float32)
            mine = on_gpu(make_input(rank, n * COUNT, torch.float32, seed=turn))
            work = dist.reduce_scatter_tensor(found, mine, async_op=True)
            del mine
            if drop_work:
                del work
            thieves = [on_gpu(torch.full((n * COUNT,), 1e9)) for _ in range(3)]
            if not drop_work:
                work.wait()
            else:
                torch.cuda.synchronize()
            wholes = all_inputs(n, n * COUNT, torch.float32, seed=turn)
            check_reduced(found, [whole[rank * COUNT : (rank + 1) * COUNT] for whole in wholes], "SUM")
            del thieves
    cases.check()


@pytest.mark.parametrize("drop_work", [False, True], ids=["waited", "work dropped too"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_memory_is_kept_until_the_operation_is_done(n: int, drop_work: bool) -> None:
    run_ranks(_inputs_dropped, n, drop_work)


def _side_stream_memory(rank: int, n: int) -> None:
    """Memory of a side stream, dropped and asked for again on that stream while the operation runs."""
    stream = torch.cuda.Stream()
    for turn in range(10):
        found = output(n * COUNT, torch.float32)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mine = on_gpu(make_input(rank, COUNT, torch.float32, seed=turn))
            work = dist.all_gather_into_tensor(found, mine, async_op=True)
            del mine
            thief = on_gpu(torch.full((COUNT,), 1e9))
        work.wait()
        for r in range(n):
            check_equal(found[r * COUNT : (r + 1) * COUNT], make_input(r, COUNT, torch.float32, seed=turn))
        del thief


@pytest.mark.parametrize("n", [1, 2])
def test_memory_of_side_streams_is_kept(n: int) -> None:
    run_ranks(_side_stream_memory, n)


def _does_not_block(rank: int, n: int) -> None:
    """wait() returns although the other rank has not even called, so the GPU can not have finished."""
    cases = Cases()
    for is_async in (True, False):
        tensor = on_gpu(make_input(rank, COUNT, torch.float32))
        warm = dist.all_reduce(tensor, async_op=is_async)  # Connects, which waits for the other rank.
        if warm is not None:
            warm.wait()
        tensor = on_gpu(make_input(rank, COUNT, torch.float32))
        torch.cuda.synchronize()
        key = f"issued-{is_async}"
        if rank == 1:
            store().wait([key])
        with cases("async" if is_async else "sync"):
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            event = torch.cuda.Event()
            event.record()
            if rank == 0:
                assert not event.query(), "the GPU finished without the other rank"
                assert work is None or not work.is_completed()
                store().set(key, "1")
            event.synchronize()
            check_reduced(tensor, all_inputs(n, COUNT, torch.float32), "SUM")
    cases.check()


def test_wait_does_not_block_the_host() -> None:
    run_ranks(_does_not_block, 2)


def _does_not_block_behind_kernels(rank: int, n: int) -> None:
    for is_async in (True, False):
        warm = dist.all_reduce(on_gpu(torch.ones(COUNT)), async_op=is_async)
        if warm is not None:
            warm.wait()
        torch.cuda.synchronize()
        tensor = torch.empty(COUNT, device=DEVICE)
        tensor.fill_(0).mul_(2)  # a kernel's first launch may wait for the GPU, to load it
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor.fill_(rank + 1)
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            work.wait()
        tensor.mul_(2)
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the host was blocked until the GPU had finished"
        assert (on_cpu(tensor) == n * (n + 1)).all()


@pytest.mark.parametrize("n", [1, 2])
def test_wait_does_not_block_behind_a_long_kernel(n: int) -> None:
    run_ranks(_does_not_block_behind_kernels, n)


def _barrier(rank: int, n: int, warm_up: bool) -> None:
    if warm_up:
        dist.all_reduce(on_gpu(torch.ones(3)))
        dist.barrier()
    torch.cuda._sleep(SLEEP_CYCLES)
    event = torch.cuda.Event()
    event.record()
    dist.barrier()
    assert event.query(), "the barrier did not wait for the GPU"
    torch.cuda._sleep(SLEEP_CYCLES)
    event.record()
    dist.barrier(async_op=True).wait()
    assert event.query(), "the asynchronous barrier's wait() did not wait for the GPU"


@pytest.mark.parametrize("warm_up", [True, pytest.param(False, marks=pytest.mark.horon_only)], ids=["used", "unused"])
@pytest.mark.parametrize("n", [1, 2])
def test_barrier_waits_for_the_gpu(n: int, warm_up: bool) -> None:
    """Also before the group's first operation on a GPU."""
    run_ranks(_barrier, n, warm_up)


def _barrier_meets(rank: int, n: int) -> None:
    for turn in range(5):
        store().set(f"in-{turn}-{rank}", "1")
        dist.barrier()
        assert store().check([f"in-{turn}-{r}" for r in range(n)]), "the barrier did not wait for all"
        dist.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_barrier_waits_for_all_ranks(n: int) -> None:
    run_ranks(_barrier_meets, n)


def _futures(rank: int, n: int) -> None:
    cases = Cases()
    for turn in range(6):
        expected = all_inputs(n, COUNT, torch.float32, seed=turn)
        with cases(f"value, turn {turn}"):
            tensor = on_gpu(make_input(rank, COUNT, torch.float32, seed=turn))
            future = dist.all_reduce(tensor, async_op=True).get_future()
            value = future.wait()
            assert isinstance(value, list) and value[0].data_ptr() == tensor.data_ptr()
            check_reduced(value[0], expected, "SUM")
        with cases(f"then, turn {turn}"):
            tensor = on_gpu(make_input(rank, COUNT, torch.float32, seed=turn))
            copied = output(COUNT, torch.float32)
            torch.cuda.current_stream().synchronize()

            def copy(done: torch.futures.Future, copied: torch.Tensor = copied) -> torch.Tensor:
                return copied.copy_(done.value()[0], non_blocking=True)  # On the future's stream, after the data.

            found = dist.all_reduce(tensor, async_op=True).get_future().then(copy).wait()
            assert found.data_ptr() == copied.data_ptr()
            check_reduced(copied, expected, "SUM")
        with cases(f"two after another, turn {turn}"):
            tensor = on_gpu(make_input(rank, COUNT, torch.float32, seed=turn))
            chained = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])
            chained = chained.then(lambda done: [done.value()])
            check_reduced(chained.wait()[0], expected, "SUM")
    cases.check()


@pytest.mark.parametrize("n", [1, 2])
def test_futures_and_callbacks(n: int) -> None:
    run_ranks(_futures, n)


def _callback_computes(rank: int, n: int) -> None:
    tensor = torch.full((COUNT,), float(rank + 1), device=DEVICE)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] / n)
    halved = future.wait() * 2
    assert (on_cpu(halved) == n + 1).all()


@pytest.mark.parametrize("n", [1, 2])
def test_callbacks_that_launch_kernels(n: int) -> None:
    run_ranks(_callback_computes, n)


def _mixed_streams_long(rank: int, n: int) -> None:
    """Kernels on the current stream run on while the operation waits for its inputs, and the results are used after."""
    x = torch.zeros(1 << 20, device=DEVICE)
    total = 0.0
    for turn in range(50):
        x.fill_(float(turn + rank))
        work = dist.all_reduce(x, async_op=True)
        other = torch.full((1 << 16,), float(turn), device=DEVICE).mul_(2)
        work.wait()
        x.add_(1)
        total = n * turn + n * (n - 1) / 2 + 1
        del other
        if turn % 10 == 9:
            assert (on_cpu(x) == total).all(), turn


@pytest.mark.parametrize("n", [1, 2, 4])
def test_kernels_before_and_after(n: int) -> None:
    run_ranks(_mixed_streams_long, n)
