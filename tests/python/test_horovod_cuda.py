"""The Horovod API on CUDA tensors, on simulated GPUs whose queues run late.

What tests/gpu/test_gpu_horovod.py leaves out: that one runs on the simulator, too.

Inputs are made on the CPU and results compared there; between the two only what the simulator runs.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cuda_simulator import CudaSimulator, needs_gpu_parts
from harness import Cases, assert_clean_exits, expect_error, store
from horovod_session import horovod

if TYPE_CHECKING:
    import torch

pytestmark = needs_gpu_parts

LATE = {"HORON_SIMULATOR_DELAY_US": "400"}


def _run(simulator: CudaSimulator, fn: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return simulator.run(fn, world_size, *args, backend="horon", env={**LATE, **options.pop("env", {})}, **options)


def _busy(ms: float) -> None:
    """Keeps the current stream busy."""
    import torch

    torch.cuda._sleep(int(ms * 1.98e6))  # cycles at the simulated clock rate


def _full(count: int, value: float) -> torch.Tensor:
    import torch

    return torch.full((count,), float(value))


def _mean(size: int) -> float:
    return (size - 1) / 2


# ---- streams, memory, poll ----


def _streams(rank: int, size: int) -> None:
    import torch

    assert not torch.cuda.is_initialized()
    with horovod() as hvd:
        hvd.allreduce(torch.ones(3))
        assert not torch.cuda.is_initialized(), "init, or an operation on the CPU, has initialised CUDA"
        cases = Cases()
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        n = 50_000
        for turn in range(6):
            source = _full(n, turn + rank).pin_memory()
            expected = _full(n, turn + _mean(size))
            for name, take_on in {"same stream": side, "another stream": other}.items():
                with cases(f"{name} {turn}"):
                    with torch.cuda.stream(side):
                        x = torch.empty(n, device="cuda")
                        _busy(3)
                        x.copy_(source, non_blocking=True)
                        handle = hvd.allreduce_async(x, name="a")
                        del x
                        thieves = [torch.empty(n, device="cuda") for _ in range(3)]
                        for thief in thieves:
                            thief.copy_(_full(n, -1).pin_memory(), non_blocking=True)
                    with torch.cuda.stream(take_on):
                        found = hvd.synchronize(handle)
                        result = torch.empty(n).pin_memory()
                        result.copy_(found, non_blocking=True)
                        del found
                        more = torch.empty(n, device="cuda")
                        more.copy_(_full(n, -2).pin_memory(), non_blocking=True)
                    take_on.synchronize()
                    assert torch.equal(result, expected), result[:3]
            with cases(f"results that were allocated for the call {turn}"):
                handle = hvd.allgather_async(source.to("cuda"), name="g")
                with torch.cuda.stream(other):
                    found = hvd.synchronize(handle)
                    _busy(2)
                    result = torch.empty(n * size).pin_memory()
                    result.copy_(found, non_blocking=True)
                    del found
                hvd.synchronize(hvd.allgather_async(_full(n, -3).to("cuda"), name="h"))
                other.synchronize()
                assert torch.equal(result, torch.cat([_full(n, turn + r) for r in range(size)]))
            with cases(f"of two that go together, the second is ready late {turn}"):
                first, second = _full(n, turn).to("cuda"), torch.empty(n, device="cuda")
                torch.cuda.synchronize()
                early = hvd.allreduce_async_(first, name="early")
                _busy(10)
                second.copy_(source, non_blocking=True)
                late = hvd.allreduce_async_(second, name="late")
                assert torch.equal(hvd.synchronize(early).cpu(), _full(n, turn))
                assert torch.equal(hvd.synchronize(late).cpu(), expected)
        cases.check()


@pytest.mark.parametrize("size", [1, 2])
def test_streams_and_memory(cuda_simulator: CudaSimulator, size: int) -> None:
    _run(cuda_simulator, _streams, size)


def _host_runs_ahead(rank: int, size: int) -> None:
    import torch

    with horovod() as hvd:
        x = torch.ones(1000).to("cuda")
        hvd.allreduce(x, name="connects")
        torch.cuda.synchronize()
        start_s = time.monotonic()
        _busy(4000)  # longer than a rank may be kept from its core
        handles = [hvd.allreduce_async(x, name=f"t{i}") for i in range(20)]
        assert not any(hvd.poll(handle) for handle in handles)
        results = [hvd.synchronize(handle) for handle in handles[:-1]]
        assert time.monotonic() - start_s < 3, "the host has waited for the GPU"
        assert not hvd.poll(handles[-1]), "poll says that the GPU has come to the end of it"
        while not hvd.poll(handles[-1]):
            time.sleep(0.005)
        assert time.monotonic() - start_s > 3
        for result in [*results, hvd.synchronize(handles[-1])]:
            assert torch.equal(result.cpu(), torch.ones(1000))


def test_the_host_runs_ahead_and_poll_tells(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _host_runs_ahead, 2)


# ---- fusion ----


def _fused(rank: int, size: int) -> None:
    import torch

    with horovod() as hvd:
        cases = Cases()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for how in ({}, {"prescale_factor": 0.5}, {"postscale_factor": 4.0}):
                for op in (hvd.Average, hvd.Sum):
                    with cases(f"{dtype} {how} {op}"):
                        order = random.Random(rank).sample(range(120), 120)
                        # Ready late, and in another order than the batches'.
                        sources = {
                            i: torch.full((i * 7 % 300 + 1,), i % 5 + rank).to(dtype).pin_memory() for i in order
                        }
                        mine = {i: source.to("cuda", non_blocking=True) for i, source in sources.items()}
                        handles = {i: hvd.allreduce_async_(mine[i], op=op, name=f"f{i}", **how) for i in order}
                        for i, handle in handles.items():
                            hvd.synchronize(handle)
                            value = (i % 5 + _mean(size)) * (size if op == hvd.Sum else 1)
                            value *= how.get("prescale_factor", 1) * how.get("postscale_factor", 1)
                            wanted = torch.full((i * 7 % 300 + 1,), value).to(dtype)
                            torch.testing.assert_close(mine[i].cpu(), wanted, rtol=1e-2, atol=1e-2)
        with cases("side by side"):
            # In place, as they lie; the bytes around them are somebody else's.
            memory = (torch.arange(64 * 40) % 7 + rank).float().to("cuda")
            parts = [memory[64 * i : 64 * i + 64] for i in range(1, 39)]
            hvd.grouped_allreduce_(parts, op=hvd.Sum)
            expected = (torch.arange(64 * 40) % 7 + rank).float()
            expected[64:-64] = (torch.arange(64 * 40) % 7 * size + _mean(size) * size).float()[64:-64]
            assert torch.equal(memory.cpu(), expected)
        cases.check()


@pytest.mark.parametrize("size", [2, 3])
def test_fused_and_scaled(cuda_simulator: CudaSimulator, size: int) -> None:
    _run(cuda_simulator, _fused, size)


# ---- what a GPU can not reduce ----


def _by_host(rank: int, size: int) -> None:
    import torch

    with horovod() as hvd:
        for dtype in (torch.int16, torch.int8, torch.uint8):
            x = torch.arange(50).to(dtype) + rank
            found = hvd.allreduce(x.to("cuda"), op=hvd.Sum)
            assert found.is_cuda
            assert torch.equal(found.cpu(), torch.arange(50).to(dtype) * size + int(_mean(size) * size))
        large = torch.full((5,), 200, dtype=torch.uint8).to("cuda")
        assert hvd.allreduce(large).tolist() == [200] * 5
        whole = torch.full((3,), 7, dtype=torch.int32).to("cuda")
        assert hvd.allreduce_(whole, op=hvd.Sum, prescale_factor=0.5) is whole
        assert whole.tolist() == [3 * size] * 3
        group = [torch.ones(4).to("cuda"), torch.ones(4, dtype=torch.int16).to("cuda")]
        assert [t.tolist() for t in hvd.grouped_allreduce(group, op=hvd.Sum)] == [[size] * 4] * 2
        ones = torch.ones(6)
        assert torch.equal(hvd.allreduce(ones.to("cuda"), op=hvd.Adasum).cpu(), ones), "Adasum of equal vectors"
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            hvd.allreduce((ones if rank == 0 else ones.to(torch.int16)).to("cuda"), op=hvd.Sum, name="types")
        with pytest.raises(hvd.HorovodInternalError, match="CPU/GPU device selection"):
            hvd.allreduce(ones.to(torch.int16).to("cpu" if rank else "cuda"), op=hvd.Sum, name="places")
        with pytest.raises(RuntimeError, match="CPU and CUDA"):
            hvd.grouped_allreduce([ones, ones.to("cuda")])


def test_what_goes_by_way_of_the_host(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _by_host, 2)


# ---- devices ----


def _several_devices(rank: int, size: int) -> None:
    """Ranks use devices of different numbers, and one rank two of them."""
    import torch

    with horovod() as hvd:
        own = f"cuda:{rank % 2}"
        x = _full(1000, rank)
        assert torch.equal(hvd.allreduce(x.to(own), op=hvd.Sum).cpu(), _full(1000, _mean(size) * size))
        away = f"cuda:{(rank + 1) % 2}"
        for turn in range(3):
            tensor = x.to(away)
            assert hvd.allreduce_(tensor, name=f"in place {turn}") is tensor
            assert torch.equal(tensor.cpu(), _full(1000, _mean(size)))
            found = hvd.allgather(x[:3].to(away))
            assert found.device == torch.device(away)
            assert torch.equal(found.cpu(), torch.cat([_full(3, r) for r in range(size)]))
            group = hvd.grouped_allreduce([x.to(own), x.to(away)], op=hvd.Sum)
            assert [tensor.device for tensor in group] == [torch.device(own), torch.device(away)]
            assert all(torch.equal(tensor.cpu(), _full(1000, _mean(size) * size)) for tensor in group)
            part = hvd.reducescatter(x.to(away), op=hvd.Sum)
            assert part.device == torch.device(away)
            assert torch.equal(part.cpu(), _full(1000 // size, _mean(size) * size))
            out, splits = hvd.alltoall(x[:size].to(away), splits=torch.ones(size, dtype=torch.int32, device=own))
            assert out.device == torch.device(away)
            assert splits.device == torch.device(own)


def test_several_devices(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _several_devices, 2, env={"HORON_SIMULATOR_DEVICES": "2"})


def _joined(rank: int, size: int) -> None:
    """Rank 0 joins without having used a GPU, and takes part in everything with nothing."""
    import torch

    with horovod() as hvd:
        for turn in range(2):
            if rank > 0:
                x = _full(70, rank).to("cuda")
                group = hvd.grouped_allreduce([_full(i % 9 + 1, rank).to("cuda") for i in range(40)], op=hvd.Sum)
                for i, found in enumerate(group):
                    assert torch.equal(found.cpu(), _full(i % 9 + 1, _mean(size) * size))
                assert torch.equal(hvd.allreduce(x, name="mean").cpu(), _full(70, _mean(size)))
                gathered = hvd.allgather(x[:1], name="rows")
                assert gathered.tolist() == [float(r) for r in range(1, size)]
                assert torch.equal(hvd.broadcast(x, size - 1, name="root").cpu(), _full(70, size - 1))
                rows = [len(part) for part in torch.arange(70).tensor_split(size)]
                scattered = hvd.reducescatter(x, op=hvd.Sum, name="part")
                assert torch.equal(scattered.cpu(), _full(rows[rank], _mean(size) * size))
                out, received = hvd.alltoall(x[:size], splits=[1] * size, name="all")
                assert out.tolist() == [float(r) for r in range(1, size)]
                assert received.tolist() == [0] + [1] * (size - 1)
            hvd.join()
            if turn == 0:
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2


def test_joined_ranks(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _joined, 3, env={"HORON_JOIN_ALL_OPERATIONS": "1"})


def _one_without_a_gpu(rank: int, size: int, path: str) -> None:
    if rank == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for GPUs
    import torch
    import torch.distributed as dist

    dist.init_process_group("horon", store=dist.FileStore(path, size), rank=rank, world_size=size)
    with horovod() as hvd:
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 of the process set can not take part"):
                hvd.allreduce(torch.ones(3).to("cuda"), op=hvd.Sum)
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [1] * 3
        hvd.join()
    dist.destroy_process_group()


def test_a_joined_rank_without_a_gpu(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(_one_without_a_gpu, 2, str(tmp_path / "store"))


# ---- failure ----


def _peer_dies(rank: int, size: int) -> None:
    """The ranks' GPUs wait for one that never comes: they are released, and the dead rank is named."""
    import horon.torch as hvd
    import torch

    hvd.init()
    x = torch.ones(1000).to("cuda")
    hvd.allreduce(x, name="connects")
    torch.cuda.synchronize()
    if rank == 1:
        _busy(100_000)
    handle = hvd.allreduce_async_(x, name="last")
    hvd.synchronize(handle)
    store().add("queued", 1)
    while int(store().add("queued", 0)) < size:
        time.sleep(0.01)
    if rank == 1:
        os._exit(7)
    start_s = time.monotonic()
    torch.cuda.synchronize()  # it would hang for ever
    assert time.monotonic() - start_s < 20
    expect_error(lambda: hvd.allreduce(x, name="next"), "HorovodInternalError", "rank 1", within_s=10)
    hvd.shutdown()
    os._exit(0)


def test_a_peer_that_dies_while_the_gpu_waits(cuda_simulator: CudaSimulator) -> None:
    outcomes = cuda_simulator.outcomes(_peer_dies, 3, backend="horon", timeout=60)
    assert_clean_exits(outcomes, [0, 7, 0])


def _too_late(rank: int, size: int) -> None:
    import horon.torch as hvd
    import torch

    hvd.init()
    x = torch.ones(1000).to("cuda")
    hvd.allreduce(x, name="connects")
    torch.cuda.synchronize()
    if rank == 1:
        _busy(20_000)
    hvd.allreduce_(x, name="late")
    deadline_s = time.monotonic() + 15
    error = ""
    while not error and time.monotonic() < deadline_s:
        try:
            hvd.allreduce(torch.ones(1), name="on the CPU")
        except hvd.HorovodInternalError as failure:
            error = str(failure)
    late = "ALLREDUCE 'allreduce.late': it was queued on the GPU, and has not come to its end within 2000 ms"
    assert late in error, error
    os._exit(0)


def test_a_gpu_that_takes_too_long(cuda_simulator: CudaSimulator) -> None:
    env = {"HORON_TIMEOUT_SECONDS": "2"}
    assert_clean_exits(cuda_simulator.outcomes(_too_late, 2, backend="horon", timeout=60, env=env))


def _left_behind(rank: int, size: int) -> None:
    """Handles that nobody waits for, a shutdown with work in flight, and a second init."""
    import torch

    for _ in range(3):
        with horovod() as hvd:
            for i in range(30):
                hvd.allreduce_async(_full(5000, i).to("cuda"), name=f"left{i}")
            found = hvd.allreduce(_full(10, rank).to("cuda"))
            assert torch.equal(found.cpu(), _full(10, _mean(size)))
            _busy(20)
            hvd.allreduce_async_(torch.ones(5).to("cuda"), name="busy")
    handle = None
    with horovod() as hvd:
        handle = hvd.allreduce_async(torch.ones(5).to("cuda"), name="kept")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.synchronize(handle)


def test_shutdown_with_work_in_flight(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _left_behind, 2)


def _leaves_early(rank: int, size: int) -> None:
    """A rank shuts down while its GPU has much to do: the others' GPUs, which wait for it, are released."""
    import horon.torch as hvd
    import torch

    hvd.init()
    x = torch.ones(1000).to("cuda")
    hvd.allreduce(x, name="connects")
    torch.cuda.synchronize()
    if rank == 1:
        _busy(30_000)
    hvd.allreduce_(x, name="last")
    if rank == 1:
        hvd.shutdown()
        os._exit(0)
    start_s = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - start_s < 15
    words = "rank 1 shut down before its GPU had come to the end"
    expect_error(lambda: hvd.allreduce(x, name="next"), "HorovodInternalError", words, within_s=10)
    os._exit(0)


def test_a_rank_that_leaves_while_its_gpu_works(cuda_simulator: CudaSimulator) -> None:
    assert_clean_exits(cuda_simulator.outcomes(_leaves_early, 2, backend="horon", timeout=60))


# ---- training ----


def _step(parameters: list[torch.Tensor], rank: int, step: int) -> None:
    """Gradients by multiplications alone, which the simulator has: of parameter i, i + rank + step in each element."""
    import torch

    loss = [parameter * float(i + rank + step) for i, parameter in enumerate(parameters)]
    torch.autograd.backward(loss, [torch.ones(p.shape).to(p.device) for p in parameters])


def _expected(shape: Any, i: int, step: int, size: int) -> torch.Tensor:
    import torch

    return torch.full(shape, i + step + _mean(size))


def _optimizer(rank: int, size: int) -> None:
    import torch

    # Small ones that go together, and one that goes by itself.
    shapes = [(7,), (300, 10), (1,), (64,), (5, 3, 2), (1700, 1600), *[(i * 97 % 4000 + 1,) for i in range(30)]]
    with horovod() as hvd:
        cases = Cases()
        variants: dict[str, tuple[dict[str, Any], bool, int]] = {
            "plain": ({}, True, 1),
            "gradients stay": ({}, False, 1),
            "two passes": ({"backward_passes_per_step": 2}, True, 2),
            "groups": ({"num_groups": 3}, True, 1),
            "fp16": ({"compression": hvd.Compression.fp16}, True, 1),
            "bf16": ({"compression": hvd.Compression.bf16}, False, 1),
            "predivided": ({"gradient_predivide_factor": 2.0}, True, 1),
        }
        for name, (arguments, set_to_none, passes) in variants.items():
            with cases(name):
                parameters = [torch.zeros(shape, device="cuda", requires_grad=True) for shape in shapes]
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(parameters, lr=1.0, foreach=False),
                    named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
                    **arguments,
                )
                total = [torch.zeros(shape) for shape in shapes]
                for step in range(3):
                    optimizer.zero_grad(set_to_none=set_to_none)
                    for number in range(passes):
                        _step(parameters, rank, step + number)
                    if name in ("plain", "gradients stay", "two passes", "predivided"):
                        assert optimizer._horon_reducer._hooks.not_sent() == [], "sent from Python"
                    optimizer.synchronize()
                    tolerance = 2e-2 if "16" in name else 1e-6
                    for i, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
                        wanted = sum(_expected(shape, i, step + number, size) for number in range(passes))
                        total[i] -= wanted
                        torch.testing.assert_close(parameter.grad.cpu(), wanted, rtol=tolerance, atol=tolerance)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                for parameter, wanted in zip(parameters, total, strict=True):
                    torch.testing.assert_close(parameter.detach().cpu(), wanted, rtol=tolerance, atol=3 * tolerance)
                _lies_side_by_side(parameters, arguments)
        cases.check()


def _lies_side_by_side(parameters: list[torch.Tensor], arguments: dict[str, Any]) -> None:
    """The gradients that go together, in the order of the parameters, without gaps but for their alignment."""
    if arguments:
        return
    import torch
    from horon.torch._gradient_reducer import _DIRECT_BYTES_ON_GPU

    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.nbytes < _DIRECT_BYTES_ON_GPU]
    assert len(gradients) == len(parameters) - 1
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    assert len(storages) == 1, "small gradients are not in one piece of memory"
    assert sum(-(-gradient.nbytes // 512) * 512 for gradient in gradients) == gradients[0].untyped_storage().nbytes()
    assert isinstance(gradients[0], torch.Tensor)


@pytest.mark.parametrize("size", [2, 3])
def test_distributed_optimizer(cuda_simulator: CudaSimulator, size: int) -> None:
    _run(cuda_simulator, _optimizer, size)


def _two_streams(rank: int, size: int) -> None:
    """Halves of a model that run, and have their backward passes, on streams of their own."""
    import torch

    with horovod() as hvd:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        parameters = [torch.zeros(2000, device="cuda", requires_grad=True) for _ in range(8)]
        kept = []
        for i, parameter in enumerate(parameters):
            with torch.cuda.stream(streams[i % 2]):
                kept.append(parameter.view_as(parameter))  # gradients are accumulated on the stream of the first use
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0, foreach=False),
            named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
        )
        torch.cuda.synchronize()
        for step in range(4):
            optimizer.zero_grad()
            losses, gradients = [], []
            for i, parameter in enumerate(parameters):
                with torch.cuda.stream(streams[i % 2]):
                    losses.append(parameter * float(i + rank + step))
                    gradients.append(torch.ones(2000).to("cuda"))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            torch.autograd.backward(losses, gradients)
            optimizer.synchronize()
            for i, parameter in enumerate(parameters):
                assert torch.equal(parameter.grad.cpu(), _expected((2000,), i, step, size)), (i, step)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_gradients_on_several_streams(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _two_streams, 2, env={"HORON_SIMULATOR_DELAY_US": "3000"})


def _broadcasts(rank: int, size: int) -> None:
    import torch

    with horovod() as hvd:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
        torch.manual_seed(rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_()
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.to("cuda")
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        wanted = hvd.broadcast_object(wanted, root_rank=size - 1)
        for name, tensor in model.state_dict().items():
            assert tensor.is_cuda
            assert torch.equal(tensor.cpu(), wanted[name]), name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9, foreach=False)
        if rank == size - 1:
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = _full(parameter.numel(), 3).view(parameter.shape).cuda()
        hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
        assert optimizer.param_groups[0]["lr"] == 0.1 * size
        for parameter in model.parameters():
            moment = optimizer.state[parameter]["momentum_buffer"]
            assert moment.device == parameter.device
            assert torch.equal(moment.cpu(), torch.full(parameter.shape, 3.0))
        assert hvd.allgather_object(("rank", rank)) == [("rank", r) for r in range(size)]
        assert hvd.cuda_built() is True
        assert hvd.nccl_built() >= 22000
        indices = torch.tensor([[0, rank + 1]])
        sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size + 1,), check_invariants=False)
        handle = hvd.sparse_allreduce_async(sparse.to("cuda"), name="sparse", op=hvd.Sum)
        assert handle().cpu().to_dense().tolist() == [float(size)] + [2.0] * size


def test_broadcasts_and_objects(cuda_simulator: CudaSimulator) -> None:
    _run(cuda_simulator, _broadcasts, 2)
