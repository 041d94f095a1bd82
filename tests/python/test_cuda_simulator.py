"""The simulator of CUDA and NCCL: what the tests of CUDA tensors rest on.

Streams, events and memory by torch's own interface; NCCL under PyTorch's own backend, which knows how NCCL is used.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cuda_simulator import CudaSimulator
from harness import TORCH_VERSION, Cases
from torch.distributed import ReduceOp


def sleep_on_device(ms: float) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(ms * 1.98e6))  # cycles at the simulated device's clock rate


# ---- the library ----


def symbols(library: Path, which: str) -> set[str]:
    """Names in a library's dynamic symbol table, without versions: "--defined-only" or "--undefined-only"."""
    output = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in output.splitlines()}


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_nothing_that_torch_calls_reaches_the_real_libraries(cuda_simulator: CudaSimulator) -> None:
    ours = symbols(cuda_simulator.library, "--defined-only")
    folder = Path(torch.__file__).parent / "lib"
    missing = {}
    for name in ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cpu.so", "libcaffe2_nvrtc.so"):
        pattern = r"cu[A-Z]" if "nvrtc" in name else r"__cuda[A-Z]|cuda[A-Z]|nccl[A-Z]"
        wanted = {symbol for symbol in symbols(folder / name, "--undefined-only") if re.match(pattern, symbol)}
        missing[name] = sorted(wanted - ours)
    assert not any(missing.values()), missing


# ---- memory and copies ----


def copies(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for count in (0, 1, 7, 100_003):
            tensor = torch.arange(count).to(dtype)
            assert torch.equal(tensor.to("cuda").cpu(), tensor)
            assert torch.equal(tensor.pin_memory().to("cuda", non_blocking=True).cpu(), tensor)
            assert torch.equal(tensor.to("cuda").clone().cpu(), tensor)


def test_copies(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(copies)
    cuda_simulator.run(copies, env={"HORON_SIMULATOR_DELAY_US": "500"})


def devices(rank: int, world_size: int) -> list[int]:
    assert torch.cuda.is_available()
    for index in range(torch.cuda.device_count()):
        tensor = torch.full((3,), float(index), device=f"cuda:{index}")
        assert torch.equal((tensor + 1).to("cuda:0").cpu(), torch.full((3,), index + 1.0))
        free, total = torch.cuda.mem_get_info(index)
        assert 0 < free < total
    return [torch.cuda.get_device_properties(index).pci_bus_id for index in range(torch.cuda.device_count())]


def test_devices(cuda_simulator: CudaSimulator) -> None:
    assert cuda_simulator.run(devices) == [[1]]
    assert cuda_simulator.run(devices, env={"HORON_SIMULATOR_DEVICES": "3"}) == [[1, 2, 3]]
    hidden = {"HORON_SIMULATOR_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "2,0"}
    assert cuda_simulator.run(devices, env=hidden) == [[3, 1]]


def no_devices(rank: int, world_size: int) -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match=r"No CUDA GPUs|no CUDA-capable device"):
        torch.zeros(1, device="cuda")


def test_no_devices(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(no_devices, env={"CUDA_VISIBLE_DEVICES": ""})


def poison(rank: int, world_size: int) -> None:
    fresh = torch.empty(1000, device="cuda")
    assert fresh.cpu().isnan().all()
    fresh.fill_(1)
    assert fresh.cpu().eq(1).all()
    address = fresh.data_ptr()
    stream = torch.cuda.Stream()
    late = torch.zeros(1000).pin_memory()
    with torch.cuda.stream(stream):
        sleep_on_device(50)
        late.copy_(fresh, non_blocking=True)
    del fresh
    torch.cuda.empty_cache()  # frees the segment, and so waits for the device
    assert late.eq(1).all()
    assert ctypes.string_at(address, 4000) == b"\xff" * 4000


def test_memory_that_is_fresh_or_was_freed_is_poisoned(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(poison)


def out_of_memory(rank: int, world_size: int) -> None:
    kept = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    del kept
    torch.empty(40 << 20, dtype=torch.uint8, device="cuda")


def test_out_of_memory(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(out_of_memory, env={"HORON_SIMULATOR_MEMORY_MB": "64"})


# ---- streams and events ----


def asynchronous(rank: int, world_size: int) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    source = torch.ones(1000).pin_memory()
    target = torch.zeros(1000).pin_memory()
    begin = time.monotonic()
    sleep_on_device(300)
    on_device = source.to("cuda", non_blocking=True)
    target.copy_(on_device, non_blocking=True)
    stream = torch.cuda.current_stream()
    assert not stream.query()
    assert time.monotonic() - begin < 0.25, "something waited for the stream"
    source.fill_(2)  # the copy has not begun: pinned memory is read when the stream gets there
    assert target.eq(0).all()
    stream.synchronize()
    assert time.monotonic() - begin >= 0.3
    assert stream.query()
    assert target.eq(2).all()
    # From pageable memory the source is read at once, into pageable memory the host waits.
    pageable = torch.ones(1000)
    sleep_on_device(50)
    on_device = pageable.to("cuda", non_blocking=True)
    pageable.fill_(3)
    assert on_device.cpu().eq(1).all()


def test_streams_are_asynchronous(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(asynchronous)


def events(rank: int, world_size: int) -> None:
    never = torch.cuda.Event()
    assert never.query()
    never.synchronize()
    torch.cuda.current_stream().wait_event(never)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(first):
        sleep_on_device(50)
        event.record()
    assert not event.query()
    second.wait_event(event)
    with torch.cuda.stream(first):
        sleep_on_device(400)
        event.record()  # what waits already waits for the first record
    second.synchronize()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert first.query()


def test_events(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(events)


def event_times(rank: int, world_size: int) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    sleep_on_device(100)
    end.record()
    end.synchronize()
    assert 99 < begin.elapsed_time(end) < 1000
    with pytest.raises(Exception, match=r"[Bb]oth events must be|invalid resource handle|timing"):
        begin.elapsed_time(torch.cuda.Event())


def test_event_times(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(event_times)


def unordered(rank: int, world_size: int, waits: bool) -> float:
    side = torch.cuda.Stream()
    data = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        sleep_on_device(100)
        data.fill_(1)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return float(data.clone().cpu()[0])


def test_a_missing_wait_is_wrong_data(cuda_simulator: CudaSimulator) -> None:
    assert cuda_simulator.run(unordered, 1, False) == [0]
    assert cuda_simulator.run(unordered, 1, True) == [1]


def ordered_with_delays(rank: int, world_size: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    data = torch.zeros(100, device="cuda")
    for i in range(60):
        stream = streams[i % len(streams)]
        stream.wait_stream(torch.cuda.current_stream() if i == 0 else streams[(i - 1) % len(streams)])
        with torch.cuda.stream(stream):
            data.add_(1).mul_(2).sub_(i)
    expected = torch.zeros(100)
    for i in range(60):
        expected.add_(1).mul_(2).sub_(i)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(data.cpu(), expected)


def test_order_holds_under_delays(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(ordered_with_delays, env={"HORON_SIMULATOR_DELAY_US": "2000"})


def legacy_stream(rank: int, world_size: int) -> None:
    """Torch's own streams do not take part in this, so CUDA is called directly."""
    cuda = ctypes.CDLL(None)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    blocking, free = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cudaStreamCreate(ctypes.byref(blocking)) == 0
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(free), 1) == 0
    not_ready, per_thread = 600, ctypes.c_void_p(2)
    memory = ctypes.c_void_p(torch.empty(64, dtype=torch.uint8, device="cuda").data_ptr())

    def touch(stream: ctypes.c_void_p | None) -> None:
        assert cuda.cudaMemsetAsync(memory, 0, ctypes.c_size_t(64), stream) == 0

    sleep_on_device(100)  # torch's default stream is the legacy stream
    for stream in (blocking, free, per_thread):
        touch(stream)
    assert cuda.cudaStreamSynchronize(free) == 0
    assert cuda.cudaStreamQuery(blocking) == not_ready
    assert cuda.cudaStreamQuery(per_thread) == not_ready
    assert cuda.cudaGetLastError() == not_ready
    assert cuda.cudaStreamSynchronize(blocking) == 0
    assert cuda.cudaStreamQuery(None) == 0
    # And the other way round.
    with torch.cuda.stream(torch.cuda.ExternalStream(blocking.value)):
        sleep_on_device(100)
    touch(None)
    assert cuda.cudaStreamQuery(None) == not_ready
    assert cuda.cudaGetLastError() == not_ready
    assert cuda.cudaStreamSynchronize(None) == 0
    assert cuda.cudaStreamQuery(blocking) == 0
    torch.cuda.current_stream().synchronize()
    for stream in (blocking, free):
        assert cuda.cudaStreamDestroy(stream) == 0
    assert cuda.cudaStreamQuery(blocking) == 400  # cudaErrorInvalidResourceHandle
    assert cuda.cudaGetLastError() == 400
    assert cuda.cudaGetLastError() == 0


def test_legacy_default_stream(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(legacy_stream)


def capture(rank: int, world_size: int) -> None:
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="not supported"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def test_capture_is_refused(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(capture)


# ---- kernels ----


def kernels(rank: int, world_size: int) -> None:
    cases = Cases()
    integers = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    functions = {
        "add": lambda x, y: x + y,
        "add with alpha": lambda x, y: torch.add(x, y, alpha=2),
        "subtract": lambda x, y: x - y,
        "multiply": lambda x, y: x * y,
        "add a number": lambda x, y: x + 3,
        "subtract from a number": lambda x, y: 3 - x,
        "multiply by a number": lambda x, y: x * 3,
        "in place": lambda x, y: x.clone().mul_(2).add_(y),
        "fill": lambda x, y: x.clone().fill_(5),
        "zeros": lambda x, y: torch.zeros_like(x),
        "full": lambda x, y: torch.full_like(x, 3),
        "abs": lambda x, y: x.abs(),
        "unaligned": lambda x, y: x.flatten()[1:] * 2,
        "permuted": lambda x, y: x.permute(2, 0, 1).contiguous(),
        "strided": lambda x, y: x[..., ::2] + y[..., 1::2],
        "broadcast": lambda x, y: x + y[0, 0],
    }
    for dtype in integers + floats:
        x, y = torch.arange(24).reshape(2, 3, 4).to(dtype), torch.arange(30, 6, -1).reshape(2, 3, 4).to(dtype)
        for name, function in functions.items():
            with cases(f"{name} {dtype}"):
                assert torch.equal(function(x.to("cuda"), y.to("cuda")).cpu(), function(x, y))
        for other in [*integers, *floats, torch.bool]:
            with cases(f"{dtype} to {other}"):
                assert torch.equal(x.to("cuda").to(other).cpu(), x.to(other))
                assert torch.equal(x.to("cuda")[..., ::2].to(other).cpu(), x[..., ::2].to(other))
        if dtype.is_floating_point:
            with cases(f"divide {dtype}"):
                assert torch.equal((x.to("cuda") / y.to("cuda")).cpu(), x / y)
                assert torch.equal((x.to("cuda") / 4).cpu(), x / 4)
    # Before 2.15 the names of the kernels do not tell one 8-bit type from another.
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if TORCH_VERSION >= (2, 15) else ():
        with cases(f"float32 to {dtype}"):
            numbers = torch.cat([torch.linspace(-60, 60, 501), torch.tensor([0.0, 1e-3, 2e-5, -3e-4])])
            there = numbers.to("cuda").to(dtype)
            assert torch.equal(there.cpu().float(), numbers.to(dtype).float())
            assert torch.equal(there.to(torch.float32).cpu(), numbers.to(dtype).float())
    cases.check()


def test_kernels(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(kernels)


class PackTable(ctypes.Structure):
    """csrc/cuda/pack_table.h: PackTable<253>, with one part."""

    _fields_ = (
        ("factor", ctypes.c_double),
        ("source_base", ctypes.c_uint64),
        ("destination_base", ctypes.c_uint64),
        ("n_parts", ctypes.c_uint32),
        ("n_single", ctypes.c_uint32),
        ("n_warps", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 3),
        ("first_warp", ctypes.c_uint32),
        ("source_low", ctypes.c_uint32),
        ("destination_low", ctypes.c_uint32),
        ("rest", ctypes.c_uint32),
        ("more_parts", ctypes.c_uint8 * (252 * 16)),
    )


def pack_kernel(rank: int, world_size: int) -> None:
    """Launched as nvcc's code does it, so that no nvcc is needed."""
    cuda = ctypes.CDLL(None)
    # As nvcc names horon::(anonymous namespace)::pack_kernel<253u>(horon::PackTable<253u>).
    name = b"_ZN5horon48_GLOBAL__N__080efebe_15_pack_kernels_cu_e563850111pack_kernelILj253EEEvNS_9PackTableIXT_EEE"
    stub = ctypes.create_string_buffer(1)
    cuda.__getattr__("__cudaRegisterFunction")(None, stub, None, name, -1, None, None, None, None, None)
    count, float32_to_bfloat16 = 1001, 6
    source, target = torch.randn(count).to("cuda"), torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    table = PackTable(0.5, source.data_ptr(), target.data_ptr(), n_parts=1, n_single=0, n_warps=2)
    table.rest = (count % 512 - 1) << 16 | float32_to_bfloat16 << 28
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    dim3 = ctypes.c_uint32 * 3

    class Size(ctypes.Structure):
        _fields_ = (("xyz", dim3),)

    launch = cuda.cudaLaunchKernel
    launch.argtypes = (ctypes.c_void_p, Size, Size, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    sleep_on_device(20)
    assert launch(ctypes.addressof(stub), Size(dim3(3, 1, 1)), Size(dim3(256, 1, 1)), arguments, 0, None) == 0
    table.factor = 100  # arguments are copied by the launch
    assert torch.equal(target.cpu(), (source.cpu() * 0.5).to(torch.bfloat16))


def test_pack_kernel(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(pack_kernel)


def unknown_kernel(rank: int, world_size: int) -> None:
    torch.zeros(5, device="cuda").cumsum(0)
    torch.cuda.synchronize()


def test_unknown_kernel_ends_the_process(cuda_simulator: CudaSimulator) -> None:
    (outcome,) = cuda_simulator.outcomes(unknown_kernel, 1)
    assert outcome.exitcode == -6
    assert "no version for the host of the kernel" in outcome.stderr
    assert "scan" in outcome.stderr
    cuda_simulator.run(unknown_kernel, env={"HORON_SIMULATOR_IGNORE_KERNELS": "1"})


# ---- NCCL under PyTorch's own backend ----


def torch_collectives(rank: int, world_size: int) -> None:
    cases = Cases()
    n, everyone = world_size, range(world_size)

    def on_device(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to("cuda")

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        expected = {ReduceOp.SUM: sum(r + 1 for r in everyone), ReduceOp.MAX: n, ReduceOp.MIN: 1}
        expected[ReduceOp.PRODUCT] = {2: 2, 4: 24}[n]
        if dtype.is_floating_point:
            expected[ReduceOp.AVG] = (n + 1) / 2
        for op, value in expected.items():
            for count in (1, 7, 10_001):
                with cases(f"all_reduce {op} {dtype} {count}"):
                    tensor = on_device([rank + 1] * count, dtype)
                    dist.all_reduce(tensor, op)
                    assert torch.equal(tensor.cpu(), torch.full((count,), value).to(dtype))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with cases(f"all_reduce {dtype}"):
            tensor = torch.full((5,), rank + 1.0).to(dtype).to("cuda")
            dist.all_reduce(tensor)
            total = float(sum(r + 1 for r in everyone))
            assert torch.equal(tensor.cpu().float(), torch.full((5,), total).to(dtype).float())
    with cases("all_reduce with a factor"):
        tensor = on_device([rank, 2])
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        assert tensor.tolist() == [sum(everyone) / 2, n]
    for root in everyone:
        with cases(f"broadcast from {root}"):
            tensor = on_device([rank, 1])
            dist.broadcast(tensor, root)
            assert tensor.tolist() == [root, 1]
        with cases(f"reduce to {root}"):
            tensor = on_device([rank, 1])
            dist.reduce(tensor, root)
            assert tensor.tolist() == ([sum(everyone), n] if rank == root else [rank, 1])
        with cases(f"gather to {root}"):
            parts = [torch.empty(1, device="cuda") for _ in everyone] if rank == root else None
            dist.gather(on_device([rank]), parts, root)
            assert parts is None or torch.cat([part.cpu() for part in parts]).tolist() == [*everyone]
        with cases(f"scatter from {root}"):
            part = torch.empty(1, device="cuda")
            dist.scatter(part, [on_device([10 + r]) for r in everyone] if rank == root else None, root)
            assert part.item() == 10 + rank
    with cases("all_gather_into_tensor"):
        gathered = torch.empty(3 * n, device="cuda")
        dist.all_gather_into_tensor(gathered, on_device([rank] * 3))
        assert gathered.tolist() == [r for r in everyone for _ in range(3)]
    with cases("all_gather"):
        lists = [torch.empty(2, device="cuda") for _ in everyone]
        dist.all_gather(lists, on_device([rank, rank]))
        assert [part.tolist() for part in lists] == [[r, r] for r in everyone]
    with cases("reduce_scatter_tensor"):
        part = torch.empty(3, device="cuda")
        dist.reduce_scatter_tensor(part, on_device([*range(3 * n)]))
        assert part.tolist() == [n * (3 * rank + i) for i in range(3)]
    with cases("all_to_all_single"):
        received = torch.empty(n, device="cuda")
        dist.all_to_all_single(received, on_device([10 * rank + r for r in everyone]))
        assert received.tolist() == [10 * r + rank for r in everyone]
    with cases("all_to_all_single with splits"):
        received = torch.empty(n * (rank + 1), device="cuda")
        sent = on_device([rank for r in everyone for _ in range(r + 1)])
        dist.all_to_all_single(received, sent, [rank + 1] * n, [r + 1 for r in everyone])
        assert received.tolist() == [r for r in everyone for _ in range(rank + 1)]
    with cases("send and recv"):
        if rank == 0:
            dist.send(on_device([5, 6]), 1)
        elif rank == 1:
            received = torch.empty(2, device="cuda")
            dist.recv(received, 0)
            assert received.tolist() == [5, 6]
    with cases("batch_isend_irecv"):
        received = torch.empty(4, device="cuda")
        sent = on_device([rank] * 4)
        operations = [dist.P2POp(dist.irecv, received, (rank - 1) % n), dist.P2POp(dist.isend, sent, (rank + 1) % n)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.tolist() == [(rank - 1) % n] * 4
    with cases("coalescing manager"):
        first, second = on_device([1]), on_device([2, 3])
        with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device()), async_ops=True) as both:
            dist.all_reduce(first)
            dist.all_reduce(second)
        both.wait()
        assert first.tolist() == [n]
        assert second.tolist() == [2 * n, 3 * n]
    with cases("on a stream, and asynchronous"):
        stream = torch.cuda.Stream()
        tensor = torch.zeros(10_000, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sleep_on_device(20)
            tensor.fill_(rank + 1)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            tensor.mul_(2)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(tensor.cpu(), torch.full((10_000,), n * (n + 1.0)))
    with cases("new_group"):
        group = dist.new_group([0, 1])
        if rank < 2:
            tensor = on_device([1])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
    with cases("barrier"):
        dist.barrier()
    cases.check()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_torch_nccl(cuda_simulator: CudaSimulator, world_size: int) -> None:
    cuda_simulator.run(torch_collectives, world_size, backend="nccl")


@pytest.mark.parametrize("blocking", ["blocking", "non-blocking"])
def test_torch_nccl_with_delays(cuda_simulator: CudaSimulator, blocking: str) -> None:
    environment = {"HORON_SIMULATOR_DELAY_US": "1000"}
    if blocking == "non-blocking":
        if TORCH_VERSION < (2, 15):
            pytest.skip("this torch does not wait for ncclAlltoAll of a non-blocking communicator")
        environment["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    cuda_simulator.run(torch_collectives, 2, backend="nccl", env=environment)
