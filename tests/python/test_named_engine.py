"""horon._C.NamedEngine: named operations in any order, between processes (Linux, one host)."""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks, store

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo: an engine of ours alone")

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)


def _engine(rank: int, world_size: int, prefix: str = "engine") -> Any:
    from horon import _C

    def make_gloo(store_: Any, rank_: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store_, rank_, size, timeout=timeout)

    return _C.NamedEngine(dist.PrefixStore(prefix, store()), rank, world_size, timedelta(seconds=40), make_gloo)


def _reduce(engine: Any, tensor: torch.Tensor, name: str, op: int = SUM, **more: Any) -> torch.Tensor:
    prescale, postscale = more.pop("prescale", 1.0), more.pop("postscale", 1.0)
    process_set = more.pop("process_set", 0)
    handle = engine.allreduce(
        [tensor], [torch.empty_like(tensor)], [name], op, prescale, postscale, process_set, **more
    )
    return engine.wait(handle)[0]


def _any_order(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
    for round_ in range(4):
        names = list(range(300))
        random.Random(rank * 10 + round_).shuffle(names)
        tensors = {i: torch.full((i % 50 + 1,), i % 7, dtype=dtypes[i % len(dtypes)]) for i in names}
        handles = {i: engine.allreduce([tensors[i]], [tensors[i]], [f"t{i}"], SUM, 1.0, 1.0, 0) for i in names}
        for i, handle in handles.items():
            assert engine.wait(handle)[0] is not None
            assert (tensors[i] == i % 7 * world_size).all(), (i, tensors[i])
    engine.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_order(world_size: int) -> None:
    run_ranks(_any_order, world_size)


def _operations(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    n = world_size
    ones = torch.ones(3, 2)
    assert torch.equal(_reduce(engine, ones * rank, "avg", AVERAGE), ones * (n - 1) / 2)
    assert torch.equal(_reduce(engine, ones * rank, "min", MIN), ones * 0)
    assert torch.equal(_reduce(engine, ones * rank, "max", MAX), ones * (n - 1))
    assert torch.equal(_reduce(engine, ones, "scaled", SUM, prescale=0.5, postscale=3.0), ones * n * 1.5)
    strided = torch.arange(6.0).reshape(2, 3).t()
    handle = engine.allreduce([strided], [strided], ["strided"], SUM, 1.0, 1.0, 0)
    engine.wait(handle)
    assert torch.equal(strided, torch.arange(6.0).reshape(2, 3).t() * n)
    group = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    handle = engine.allreduce(group, [torch.empty_like(t) for t in group], ["g.0", "g.1"], SUM, 1.0, 1.0, 0)
    assert [t.tolist() for t in engine.wait(handle)] == [[n] * 2, [n] * 3]
    rows = engine.wait(engine.allgather([torch.full((rank, 2), rank)], ["gather"], 0))[0]
    assert rows.tolist() == [[r, r] for r in range(n) for _ in range(r)]
    tensor = torch.full((3,), rank)
    engine.wait(engine.broadcast(tensor, tensor, n - 1, "broadcast", 0))
    assert tensor.tolist() == [n - 1] * 3
    out, received = engine.wait(engine.alltoall(torch.full((n * (rank + 1),), rank), [rank + 1] * n, "alltoall", 0))
    assert received.tolist() == [r + 1 for r in range(n)]
    assert out.tolist() == [r for r in range(n) for _ in range(r + 1)]
    part = engine.wait(engine.reducescatter([torch.ones(n + 1, 2)], ["scatter"], SUM, 1.0, 1.0, 0))[0]
    assert part.tolist() == [[n, n]] * (2 if rank == 0 else 1)
    engine.wait(engine.barrier(0))
    engine.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_operations(world_size: int) -> None:
    run_ranks(_operations, world_size)


def _errors(rank: int, world_size: int) -> None:
    from horon import _C

    engine = _engine(rank, world_size)
    with pytest.raises(_C.HorovodInternalError, match="Mismatched data types: One rank had type"):
        _reduce(engine, torch.ones(2, dtype=torch.float64 if rank else torch.float32), "x")
    with pytest.raises(_C.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        _reduce(engine, torch.ones(2 + rank), "x")
    assert _reduce(engine, torch.ones(2), "x").tolist() == [world_size] * 2
    one = torch.ones(4)
    for call in (
        lambda: engine.allreduce([one], [one], [], SUM, 1.0, 1.0, 0),
        lambda: engine.broadcast(one, one, world_size, "b", 0),
        lambda: engine.alltoall(one, [1], "a", 0),
        lambda: engine.allreduce([one], [one], ["p"], SUM, 1.0, 1.0, 7),
        lambda: engine.wait(10**6),
    ):
        with pytest.raises(ValueError):
            call()
    if rank == 0:
        handle = engine.allreduce([one], [one], ["twice"], SUM, 1.0, 1.0, 0)
        with pytest.raises(ValueError, match="same name"):
            engine.allreduce([one], [one], ["twice"], SUM, 1.0, 1.0, 0)
        assert engine.poll(handle) is False
        engine.wait(engine.barrier(0))
        engine.wait(handle)
    else:
        engine.wait(engine.barrier(0))
        _reduce(engine, one, "twice")
    engine.shutdown()


def test_errors_leave_it_running() -> None:
    run_ranks(_errors, 2)


def _sets_and_join(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    first, second = engine.add_process_set([0, 1]), engine.add_process_set([2, 1])
    assert engine.process_sets() == [0, first, second] and engine.process_set_ranks(second) == [1, 2]
    with pytest.raises(ValueError, match="same ranks"):
        engine.add_process_set([0, 1])
    for process_set in random.Random(rank).sample([first, second], 2):
        if rank in engine.process_set_ranks(process_set):
            assert _reduce(engine, torch.ones(1), "s", process_set=process_set).item() == 2
    assert engine.remove_process_set(first) and not engine.remove_process_set(first)
    for i in range(rank):
        assert _reduce(engine, torch.ones(1), f"u{i}").item() == world_size - 1 - i
    assert engine.wait(engine.join())[0].item() == world_size - 1
    engine.shutdown()


def test_process_sets_and_join() -> None:
    run_ranks(_sets_and_join, 3)


def _killed(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    _reduce(engine, torch.ones(1), "x")
    if rank == 1:
        os._exit(7)
    expect_error(lambda: _reduce(engine, torch.ones(1), "y"), "HorovodInternalError", "rank 1", within_s=10)
    expect_error(lambda: _reduce(engine, torch.ones(1), "z"), "HorovodInternalError", "rank 1", within_s=1)
    engine.shutdown()
    os._exit(0)


def test_a_killed_rank_is_named() -> None:
    assert_clean_exits(run_fresh_processes(_killed, 3), [0, 7, 0])


def _shutdown_while_waiting(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    if rank == 1:
        time.sleep(0.3)
    else:
        expect_error(lambda: _reduce(engine, torch.ones(1), "x"), "HorovodInternalError", "rank 1", within_s=10)
    engine.shutdown()
    engine.shutdown()
    expect_error(lambda: _reduce(engine, torch.ones(1), "y"), "HorovodInternalError")


def test_shutdown_while_others_wait() -> None:
    run_ranks(_shutdown_while_waiting, 3)


def _leaks(rank: int, world_size: int) -> None:
    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def once(i: int) -> None:
        engine = _engine(rank, world_size, f"engine{i}")
        _reduce(engine, torch.ones(1), "x")
        engine.shutdown()

    once(0)
    before = count()
    for i in range(1, 101):
        once(i)
    assert count() == before
    assert threading.active_count() == 1


def test_init_and_shutdown_a_hundred_times() -> None:
    assert_clean_exits(run_fresh_processes(_leaks, 2, timeout=100))


def _idle(rank: int, world_size: int) -> None:
    engine = _engine(rank, world_size)
    handles = [engine.allreduce([t], [t], [f"t{i}"], SUM, 1.0, 1.0, 0) for i, t in enumerate(torch.ones(50, 8))]
    for handle in handles:
        engine.wait(handle)
    engine.wait(engine.barrier(0))
    time.sleep(1)
    before = time.process_time()
    time.sleep(5)
    assert time.process_time() - before < 0.02
    engine.wait(engine.barrier(0))
    engine.shutdown()


def test_idle_uses_no_processor() -> None:
    assert_clean_exits(run_fresh_processes(_idle, 2))
