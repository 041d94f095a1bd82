"""Collectives captured into CUDA graphs, and replayed with other data."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_harness import assert_clean_exits, run_fresh_processes, run_ranks
from gpu_tensors import DEVICE, all_inputs, check_equal, check_reduced, make_input, on_cpu
from harness import expect_error

pytestmark = pytest.mark.needs_kernels

COUNT = 4099
REPLAYS = 4


def _captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Runs the body once on a side stream, as PyTorch asks for, then captures it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def _replay_all_reduce(rank: int, n: int, is_async: bool) -> None:
    static = torch.zeros(COUNT, device=DEVICE)
    result = torch.zeros(COUNT, device=DEVICE)

    def body() -> None:
        work = dist.all_reduce(static, async_op=is_async)
        if work is not None:
            work.wait()
        result.copy_(static * 2)

    graph = _captured(body)
    for turn in range(REPLAYS):
        static.copy_(make_input(rank, COUNT, torch.float32, seed=turn))
        graph.replay()
        expected = all_inputs(n, COUNT, torch.float32, seed=turn)
        check_reduced(static, expected, "SUM")
        check_reduced(on_cpu(result) / 2, expected, "SUM")
    # Ordinary calls, before and after replays, are as before.
    tensor = make_input(rank, COUNT, torch.float32).to(DEVICE)
    dist.all_reduce(tensor)
    check_reduced(tensor, all_inputs(n, COUNT, torch.float32), "SUM")
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", [1, 2])
def test_all_reduce(n: int, is_async: bool) -> None:
    run_ranks(_replay_all_reduce, n, is_async)


def _replay_all_gather(rank: int, n: int) -> None:
    static, gathered = torch.zeros(COUNT, device=DEVICE), torch.zeros(n * COUNT, device=DEVICE)
    scattered = torch.zeros(COUNT, device=DEVICE)

    def body() -> None:
        dist.all_gather_into_tensor(gathered, static)
        dist.reduce_scatter_tensor(scattered, gathered)

    graph = _captured(body)
    for turn in range(REPLAYS):
        static.copy_(make_input(rank, COUNT, torch.float32, seed=turn))
        graph.replay()
        for r in range(n):
            check_equal(gathered[r * COUNT : (r + 1) * COUNT], make_input(r, COUNT, torch.float32, seed=turn))
        check_reduced(scattered, [make_input(rank, COUNT, torch.float32, seed=turn)] * n, "SUM")


@pytest.mark.parametrize("n", [1, 2])
def test_all_gather_and_reduce_scatter(n: int) -> None:
    run_ranks(_replay_all_gather, n)


def _replay_coalesced(rank: int, n: int, counts: list[int], is_async: bool) -> None:
    statics = [torch.zeros(count, device=DEVICE) for count in counts]

    def body() -> None:
        with dist.distributed_c10d._coalescing_manager(async_ops=is_async) as manager:
            for tensor in statics:
                dist.all_reduce(tensor)
        if is_async:
            manager.wait()

    graph = _captured(body)
    for turn in range(REPLAYS):
        for i, (tensor, count) in enumerate(zip(statics, counts, strict=True)):
            tensor.copy_(make_input(rank, count, torch.float32, seed=turn + i % 7))
        graph.replay()
        for i, (tensor, count) in enumerate(zip(statics, counts, strict=True)):
            check_reduced(tensor, all_inputs(n, count, torch.float32, seed=turn + i % 7), "SUM")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["large ones", "fused small ones"])
@pytest.mark.parametrize("n", [1, 2])
def test_coalesced(n: int, kind: str, is_async: bool) -> None:
    counts = [2 << 20, 1 << 20] if kind == "large ones" else [1 + 29 * i % 700 for i in range(300)]
    run_ranks(_replay_coalesced, n, counts, is_async)


def _replay_several_graphs(rank: int, n: int) -> None:
    """Two graphs with fused calls share the fusion buffer with each other and with ordinary calls."""
    sets = [[torch.zeros(100 + i, device=DEVICE) for i in range(200)] for _ in range(2)]

    def reduce_all(tensors: list[torch.Tensor]) -> None:
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    graphs = [_captured(lambda tensors=tensors: reduce_all(tensors)) for tensors in sets]
    ordinary = [torch.zeros(100 + i, device=DEVICE) for i in range(200)]
    for turn in range(REPLAYS):
        for k, tensors in enumerate([*sets, ordinary]):
            for i, tensor in enumerate(tensors):
                tensor.copy_(make_input(rank, 100 + i, torch.float32, seed=turn + k))
        graphs[turn % 2].replay()
        reduce_all(ordinary)
        graphs[1 - turn % 2].replay()
        for k, tensors in enumerate([*sets, ordinary]):
            for i, tensor in enumerate(tensors):
                check_reduced(tensor, all_inputs(n, 100 + i, torch.float32, seed=turn + k), "SUM")


@pytest.mark.parametrize("n", [1, 2])
def test_several_graphs_and_ordinary_calls(n: int) -> None:
    run_ranks(_replay_several_graphs, n)


def _named_in_capture(rank: int, n: int) -> None:
    """A named operation negotiates on the host, which can not be captured: an error, and no hang."""
    import horon.torch as hvd

    hvd.init()
    x = torch.ones(10, device=DEVICE)
    hvd.allreduce(x, name="warm")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expect_error(lambda: hvd.allreduce(x, name="captured"), "captur")
    assert on_cpu(hvd.allreduce(x, name="after", op=hvd.Sum)).tolist() == [n] * 10
    hvd.shutdown()


@pytest.mark.horon_only
@pytest.mark.parametrize("n", [1, 2])
def test_named_operations_say_that_they_can_not_be_captured(n: int) -> None:
    run_ranks(_named_in_capture, n)


def _barriers_beside(rank: int, n: int) -> None:
    """Of the thread that captures, and of another one, on a group that never uses a GPU."""
    static = torch.zeros(COUNT, device=DEVICE)
    other_group = dist.new_group()
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            for _ in range(3):
                dist.barrier(group=other_group)
        except BaseException as error:
            failures.append(error)

    def body() -> None:
        dist.all_reduce(static)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        dist.barrier()
        thread.join()

    graph = _captured(body)
    assert not failures, failures
    static.copy_(make_input(rank, COUNT, torch.float32))
    graph.replay()
    check_reduced(static, all_inputs(n, COUNT, torch.float32), "SUM")


@pytest.mark.parametrize("n", [1, 2])
def test_barriers_while_a_graph_is_captured(n: int) -> None:
    run_ranks(_barriers_beside, n)


def _live_graph(rank: int, n: int, destroys: bool) -> None:
    static = torch.zeros(COUNT, device=DEVICE)
    globals()["kept"] = graph = _captured(lambda: dist.all_reduce(static))
    static.fill_(rank + 1)
    graph.replay()
    assert (on_cpu(static) == n * (n + 1) / 2).all()
    if destroys:
        dist.destroy_process_group()


@pytest.mark.horon_only
@pytest.mark.parametrize("destroys", [True, False], ids=["destroyed", "exit"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_graph_that_lives_on_holds_nobody_up(n: int, destroys: bool) -> None:
    """NCCL neither finalizes nor aborts a communicator before the graphs that use it are gone."""
    assert_clean_exits(run_fresh_processes(_live_graph, n, destroys, timeout=60))
