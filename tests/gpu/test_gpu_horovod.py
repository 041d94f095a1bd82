"""The Horovod API on CUDA tensors: all collectives, in any order, grouped, scaled, mixed with CPU tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_harness import run_ranks
from gpu_tensors import DEVICE, FLOATING, check_equal, moved_input, on_cpu, on_gpu
from harness import Cases, store
from horovod_session import horovod

pytestmark = pytest.mark.horon_only

RANKS = [1, 2, 4]
REDUCED = [*FLOATING, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (17,), (5, 3), (70000,)]


def _tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank + 17 * seed)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def _reference(tensors: list[torch.Tensor], op: int) -> torch.Tensor:
    stacked = torch.stack([tensor.double() for tensor in tensors])
    by_op = {0: stacked.mean(0), 1: stacked.sum(0), 3: stacked.amin(0), 4: stacked.amax(0), 5: stacked.prod(0)}
    dtype = tensors[0].dtype
    return (by_op[op] if dtype.is_floating_point else by_op[op].trunc()).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.is_cuda, "the result is not on the GPU"
    loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(found.dtype, 1e-6)
    torch.testing.assert_close(on_cpu(found), expected, rtol=loose, atol=loose)


def _allreduce(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        ops = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
        for dtype, shape, op in itertools.product(REDUCED, SHAPES, ops):
            if len(shape) != 1 and dtype is not torch.float32:
                continue
            with cases(f"{dtype} {shape} {op}"):
                tensors = [_tensor(r, shape, dtype) for r in range(size)]
                expected, mine = _reference(tensors, op), on_gpu(tensors[rank])
                _close(hvd.allreduce(mine, op=op), expected)
                check_equal(mine, tensors[rank])
                _close(hvd.synchronize(hvd.allreduce_async(mine, op=op, name="n")), expected)
                assert hvd.allreduce_(mine, op=op) is mine
                _close(mine, expected)
        cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_allreduce(n: int) -> None:
    run_ranks(_allreduce, n)


def _scaling(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in FLOATING:
            with cases(f"prescale and postscale {dtype}"):
                tensors = [_tensor(r, (5001,), dtype) for r in range(size)]
                found = hvd.allreduce(on_gpu(tensors[rank]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
                _close(found, (torch.stack([t.double() for t in tensors]).sum(0) * 1.5).to(dtype))
        with cases("prescale of integers"):
            whole = on_gpu(torch.full((3,), 7, dtype=torch.int32))
            assert on_cpu(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5)).tolist() == [3 * size] * 3
        with cases("average by default"):
            x = on_gpu(torch.arange(6.0) + rank)
            _close(hvd.allreduce(x), torch.arange(6.0) + (size - 1) / 2)
        cases.check()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_scaling(n: int) -> None:
    run_ranks(_scaling, n)


def _compression(rank: int, size: int) -> None:
    with horovod() as hvd:
        x = torch.randn(3001, generator=torch.Generator().manual_seed(1)) + rank
        mean = torch.randn(3001, generator=torch.Generator().manual_seed(1)) + (size - 1) / 2
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            found = hvd.allreduce(on_gpu(x), compression=compression)
            assert found.dtype == torch.float32
            torch.testing.assert_close(on_cpu(found), mean, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("n", [1, 2])
def test_compression(n: int) -> None:
    run_ranks(_compression, n)


def _grouped(rank: int, size: int) -> None:
    with horovod() as hvd:
        shapes = [(4,), (3, 2), (0,), (5000,), *[(i % 50 + 1,) for i in range(100)]]
        dtypes = [(torch.float32, torch.float64, torch.float32, torch.int64)[i % 4] for i in range(len(shapes))]
        everyones = [[_tensor(r, s, d) for s, d in zip(shapes, dtypes, strict=True)] for r in range(size)]
        expected = [_reference(list(t), hvd.Sum) for t in zip(*everyones, strict=True)]
        mine = [on_gpu(t) for t in everyones[rank]]
        for found, wanted in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True):
            _close(found, wanted)
        outputs = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="g"))
        for found, wanted in zip(outputs, expected, strict=True):
            _close(found, wanted)
        returned = hvd.grouped_allreduce_(mine, op=hvd.Sum)
        assert all(a is b for a, b in zip(returned, mine, strict=True))
        for found, wanted in zip(mine, expected, strict=True):
            _close(found, wanted)


@pytest.mark.parametrize("n", RANKS)
def test_grouped_allreduce(n: int) -> None:
    run_ranks(_grouped, n)


def _any_order(rank: int, size: int) -> None:
    """Every rank in an order of its own; sizes from one element to a megabyte; synchronized in yet another order."""
    with horovod() as hvd:
        for turn in range(3):
            order = torch.randperm(200, generator=torch.Generator().manual_seed(10 * turn + rank)).tolist()
            sizes = [(1, 7, 1000, 250_000)[i % 4] if i % 20 == 3 else i % 300 + 1 for i in range(200)]
            mine = {i: on_gpu(torch.full((sizes[i],), float(i + rank))) for i in order}
            handles = {i: hvd.allreduce_async_(mine[i], op=hvd.Sum, name=f"t{i}") for i in order}
            for i in reversed(order):
                assert hvd.synchronize(handles[i]) is mine[i]
            for i in range(200):
                check_equal(mine[i], torch.full((sizes[i],), size * i + size * (size - 1) / 2))


@pytest.mark.parametrize("n", RANKS)
def test_any_order(n: int) -> None:
    run_ranks(_any_order, n)


def _mixed_devices(rank: int, size: int) -> None:
    with horovod() as hvd:
        order = torch.randperm(100, generator=torch.Generator().manual_seed(rank)).tolist()
        devices = ["cpu" if i % 3 == 0 else DEVICE for i in range(100)]
        mine = {i: torch.full((i + 1,), float(i + rank)).to(devices[i]) for i in order}
        handles = {i: hvd.allreduce_async(mine[i], op=hvd.Average, name=f"m{i}") for i in order}
        for i in order:
            found = hvd.synchronize(handles[i])
            assert found.device.type == torch.device(devices[i]).type
            torch.testing.assert_close(on_cpu(found), torch.full((i + 1,), i + (size - 1) / 2))


@pytest.mark.parametrize("n", RANKS)
def test_cpu_and_cuda_tensors_together(n: int) -> None:
    run_ranks(_mixed_devices, n)


def _device_mismatch(rank: int, size: int) -> None:
    """One rank's tensor is on the CPU: an error on all ranks, and the next operation works."""
    with horovod() as hvd:
        x = torch.ones(5) if rank == 0 else on_gpu(torch.ones(5))
        with pytest.raises(hvd.HorovodInternalError, match=r"(?i)mismatch|device"):
            hvd.allreduce(x, name="here and there")
        _close(hvd.allreduce(on_gpu(torch.ones(5)), op=hvd.Sum, name="after"), torch.full((5,), float(size)))


def test_tensors_on_different_kinds_of_devices_are_an_error() -> None:
    run_ranks(_device_mismatch, 2)


def _moving(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in MOVED:
            for rows in ([2] * size, list(range(size)), [4000] * size):
                with cases(f"allgather {dtype} {rows}"):
                    tensors = [_tensor(r, (rows[r], 3), dtype) for r in range(size)]
                    check_equal(hvd.allgather(on_gpu(tensors[rank])), torch.cat(tensors))
                    handle = hvd.allgather_async(on_gpu(tensors[rank]), name="a")
                    check_equal(hvd.synchronize(handle), torch.cat(tensors))
            for shape, root in itertools.product(SHAPES, {0, size - 1}):
                with cases(f"broadcast {dtype} {shape} {root}"):
                    mine, expected = on_gpu(_tensor(rank, shape, dtype)), _tensor(root, shape, dtype)
                    check_equal(hvd.broadcast(mine, root), expected)
                    check_equal(mine, _tensor(rank, shape, dtype))
                    assert hvd.broadcast_(mine, root) is mine
                    check_equal(mine, expected)
            with cases(f"alltoall {dtype}"):
                splits = [[(r + s) % 3 for s in range(size)] for r in range(size)]
                tensors = [_tensor(r, (sum(splits[r]), 3), dtype) for r in range(size)]
                expected = torch.cat([tensors[r].split(splits[r])[rank] for r in range(size)])
                found, received = hvd.alltoall(on_gpu(tensors[rank]), splits=splits[rank])
                check_equal(found, expected)
                assert received.tolist() == [splits[r][rank] for r in range(size)]
                even = [moved_input(r, 2 * size, dtype) for r in range(size)]
                check_equal(hvd.alltoall(on_gpu(even[rank])), torch.cat([t[2 * rank : 2 * rank + 2] for t in even]))
        cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_allgather_broadcast_alltoall(n: int) -> None:
    run_ranks(_moving, n)


def _reducescatter(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        shapes = ((size * 2,), (size * 2 + 1, 3), (1, 4), (0,), (30000, 2))
        for dtype, shape, op in itertools.product(REDUCED, shapes, (hvd.Average, hvd.Sum)):
            with cases(f"{dtype} {shape} {op}"):
                tensors = [_tensor(r, shape, dtype) for r in range(size)]
                each, more = divmod(shape[0], size)
                start = rank * each + min(rank, more)
                expected = _reference(tensors, op)[start : start + each + (rank < more)]
                _close(hvd.reducescatter(on_gpu(tensors[rank]), op=op), expected)
                for found in hvd.grouped_reducescatter([on_gpu(tensors[rank])] * 2, op=op):
                    _close(found, expected)
        cases.check()


@pytest.mark.parametrize("n", RANKS)
def test_reducescatter(n: int) -> None:
    run_ranks(_reducescatter, n)


def _process_sets(rank: int, size: int) -> None:
    import horon.torch as hvd

    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    with horovod(process_sets=[even, odd]):
        mine = even if rank % 2 == 0 else odd
        x = torch.full((1000,), float(rank))
        for _ in range(3):
            found = hvd.allreduce(on_gpu(x), op=hvd.Sum, process_set=mine)
            check_equal(found, torch.full((1000,), float(sum(mine.ranks))))
        # Both sets and the whole world, in flight together and in another order on each rank.
        handles = {}
        for kind in ["set", "world"] if rank % 2 else ["world", "set"]:
            arguments = {"process_set": mine} if kind == "set" else {}
            handles[kind] = hvd.allreduce_async(on_gpu(x), op=hvd.Sum, name=f"together {kind}", **arguments)
        check_equal(hvd.synchronize(handles["set"]), torch.full((1000,), float(sum(mine.ranks))))
        check_equal(hvd.synchronize(handles["world"]), torch.full((1000,), size * (size - 1) / 2))
        found = hvd.allgather(on_gpu(x[:1]), process_set=mine)
        assert on_cpu(found).tolist() == [float(r) for r in mine.ranks]
        hvd.barrier()  # The sets share no rank: the first to leave would take the coordinator from the other.


@pytest.mark.parametrize("n", [2, 4])
def test_process_sets(n: int) -> None:
    run_ranks(_process_sets, n)


def _join(rank: int, size: int) -> None:
    """A rank that has joined takes part with zeros."""
    with horovod() as hvd:
        for step in range(rank + 2):
            found = hvd.allreduce(on_gpu(torch.full((100,), float(rank + 1))), op=hvd.Sum, name=f"s{step}")
            expected = sum(r + 1 for r in range(size) if r + 2 > step)
            check_equal(found, torch.full((100,), float(expected)))
        assert hvd.join() == size - 1
        _close(hvd.allreduce(on_gpu(torch.ones(3)), op=hvd.Sum), torch.full((3,), float(size)))


@pytest.mark.parametrize("n", RANKS)
def test_join(n: int) -> None:
    run_ranks(_join, n)


def _poll(rank: int, size: int) -> None:
    """poll() is false while another rank has not called, and true once the GPU has the result."""
    with horovod() as hvd:
        hvd.allreduce(on_gpu(torch.ones(3)), name="h")  # Connects.
        if rank == 0:
            handle = hvd.allreduce_async(on_gpu(torch.ones(3)), name="h")
            assert not hvd.poll(handle), "nobody else has called it"
            store().set("asked", "1")
        else:
            store().wait(["asked"])
            handle = hvd.allreduce_async(on_gpu(torch.ones(3)), name="h")
        while not hvd.poll(handle):
            pass
        # Read on a stream that waits for nothing: true must mean that the data is there.
        with torch.cuda.stream(torch.cuda.Stream()):
            assert on_cpu(hvd.synchronize(handle)).tolist() == [1.0] * 3
        assert hvd.synchronize(handle) is None, "as in Horovod"
        with pytest.raises(ValueError):
            hvd.poll(handle)


def test_poll_tells_the_truth() -> None:
    run_ranks(_poll, 2)


def _poll_behind_a_kernel(rank: int, size: int) -> None:
    with horovod() as hvd:
        hvd.allreduce(torch.ones(3, device=DEVICE), name="h")
        torch.cuda._sleep(1_000_000_000)
        ready = torch.cuda.Event()
        ready.record()
        handle = hvd.allreduce_async(torch.ones(3, device=DEVICE), name="h")
        polled = hvd.poll(handle)
        assert not polled or ready.query(), "done before its input existed"
        while not hvd.poll(handle):
            pass
        assert ready.query()
        hvd.synchronize(handle)


@pytest.mark.parametrize("n", [1, 2])
def test_poll_waits_for_the_gpu(n: int) -> None:
    run_ranks(_poll_behind_a_kernel, n)


def _producer_stream(rank: int, size: int) -> None:
    """The input is produced on a side stream right before the call, and the output read on it right after."""
    with horovod() as hvd:
        stream = torch.cuda.Stream()
        for turn in range(10):
            source = torch.full((100_000,), float(turn + rank)).pin_memory()
            result = torch.zeros(100_000).pin_memory()
            with torch.cuda.stream(stream):
                x = torch.empty(100_000, device=DEVICE)
                x.copy_(source, non_blocking=True)
                found = hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum, name="p"))
                result.copy_(found, non_blocking=True)
            stream.synchronize()
            check_equal(result, torch.full((100_000,), size * turn + size * (size - 1) / 2))


@pytest.mark.parametrize("n", [1, 2])
def test_the_streams_of_the_caller(n: int) -> None:
    run_ranks(_producer_stream, n)


def _dropped(rank: int, size: int) -> None:
    """The caller keeps no tensor: memory lives until the operation is done."""
    with horovod() as hvd:
        for turn in range(10):
            handle = hvd.allreduce_async(on_gpu(torch.full((100_000,), float(turn + rank))), op=hvd.Sum, name="d")
            thieves = [on_gpu(torch.full((100_000,), 1e9)) for _ in range(3)]
            check_equal(hvd.synchronize(handle), torch.full((100_000,), size * turn + size * (size - 1) / 2))
            del thieves


@pytest.mark.parametrize("n", [1, 2])
def test_memory_is_kept(n: int) -> None:
    run_ranks(_dropped, n)


def _mismatches(rank: int, size: int) -> None:
    with horovod() as hvd:
        first = rank == 0
        cases = {
            "Mismatched data types": lambda: hvd.allreduce(
                on_gpu(torch.ones(3).to(torch.int32 if first else torch.float32))
            ),
            "Mismatched ALLREDUCE tensor shapes": lambda: hvd.allreduce(on_gpu(torch.ones(3 if first else 4))),
            "root ranks": lambda: hvd.broadcast(on_gpu(torch.ones(3)), 0 if first else 1),
        }
        for message, call in cases.items():
            with pytest.raises(hvd.HorovodInternalError, match=message):
                call()
            _close(hvd.allreduce(on_gpu(torch.ones(2)), op=hvd.Sum, name="after"), torch.full((2,), float(size)))


def test_mismatches_are_errors_and_no_hangs() -> None:
    run_ranks(_mismatches, 2)


def _built(rank: int, size: int) -> None:
    with horovod() as hvd:
        assert hvd.nccl_built() and hvd.cuda_built()


def test_the_build_says_what_it_has() -> None:
    run_ranks(_built, 1)


def _gradients(rank: int, size: int) -> None:
    with horovod() as hvd:
        x = on_gpu(torch.full((4,), float(rank + 1))).requires_grad_()
        hvd.allreduce(x, op=hvd.Sum).backward(on_gpu(torch.ones(4)))
        assert on_cpu(x.grad).tolist() == [float(size)] * 4
        y = on_gpu(torch.full((2, 3), float(rank))).requires_grad_()
        hvd.allgather(y).backward(on_gpu(torch.full((2 * size, 3), 2.0)))
        assert on_cpu(y.grad).tolist() == [[2.0] * 3] * 2  # Averaged, as in Horovod.


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_of_operations(n: int) -> None:
    run_ranks(_gradients, n)
