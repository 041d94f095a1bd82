"""Random operations of every kind, size and dtype, on overlapping groups, each used by a thread of its own.

All ranks draw what to do from the same seeds, and how (asynchronous or not, when to wait) from their own. By default
4 ranks on 2 cores for about ten seconds; HORON_STRESS=1: 8 ranks for ten minutes; HORON_STRESS_SECONDS and
HORON_STRESS_SEED change that.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import shm_entries
from harness import BACKEND, STRESS, assert_clean_exits, on_gloo, run_fresh_processes
from reference import DTYPES, HALF, check_equal, check_reduced, reduce_op, supported

INLINE = 8 * 1024
BUFFER = 512 * 1024
BATCH = 40
"""Operations between two looks at the clock."""
MOST_PENDING = 60

Check = Callable[[], None]


@pytest.fixture(autouse=True)
def nothing_in_shm(shm_before: set[str]) -> Iterator[None]:
    """Nothing may be left in /dev/shm."""
    yield
    if not on_gloo():
        assert not shm_entries() - shm_before


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = (
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    )


def _used_bytes() -> int:
    """What is allocated, and shared memory.

    Not resident memory: what malloc keeps of freed memory grows with its luck.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    shared_pages = int(Path("/proc/self/statm").read_text().split()[2])
    return int(info.uordblks + info.hblkhd) + shared_pages * os.sysconf("SC_PAGE_SIZE")


class Drawn:
    """One operation, as all ranks draw it. `rank` and `size` are those in the group."""

    def __init__(self, draw: random.Random, members: list[int], rank: int, group: Any, step: int) -> None:
        self.draw, self.members, self.rank, self.group, self.step = draw, members, rank, group, step
        self.size = len(members)
        self.kind = draw.choice(KINDS)
        self.dtype = draw.choice(DTYPES)
        self.count = self._count()
        self.root = draw.randrange(self.size)
        self.op = draw.choice(["SUM", "SUM", "MAX", "MIN", "PRODUCT", "AVG", "BOR"])
        if not supported(self.op, self.dtype):
            self.op = "SUM"
            if not supported(self.op, self.dtype):
                self.dtype = torch.float32
        if on_gloo() and self.dtype not in (torch.float32, torch.int64):
            self.dtype = torch.float32

    def _count(self) -> int:
        element = torch.empty(0, dtype=self.dtype).element_size()
        around = self.draw.choice([INLINE, INLINE, INLINE // self.size, BUFFER // self.size, BUFFER]) // element
        where = self.draw.random()
        if where < 0.35:
            return self.draw.choice([0, 1, 2, 3, 7, 64, 100])
        if where < 0.65:
            return self.draw.randrange(1, INLINE // element)
        if where < 0.93:
            return max(around + self.draw.choice([-65, -1, 0, 1, 17]), 0)
        return self.draw.randrange(100_000, 400_000)

    def data(self, source: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        """What `source` brings; small integers, so that sums and products are exact in every dtype."""
        numbers = torch.arange(self.count if count is None else count)
        numbers = (numbers * (2 * (self.step % 50) + 1) + 7 * source + 3 * part + self.step) % 5
        if self.dtype is torch.bool:
            return numbers % 2 == 0
        if not self.dtype.is_signed:
            return (numbers + 1).to(self.dtype)
        return (numbers - 2).to(self.dtype)

    def all_data(self, part: int = 0, count: int | None = None) -> list[torch.Tensor]:
        """What all ranks bring."""
        return [self.data(source, part, count) for source in range(self.size)]

    def is_exact(self) -> bool:
        """Half types can not hold a product of eight."""
        return not (self.op == "PRODUCT" and self.dtype in HALF)


def _all_reduce(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensor = d.data(d.rank)
    work = dist.all_reduce(tensor, reduce_op(d.op), group=d.group, async_op=async_op)
    return work, lambda: check_reduced(tensor, d.all_data(), d.op)


def _strided_all_reduce(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensor = torch.stack([d.data(d.rank), d.data(d.rank)], dim=1)[:, 0]
    work = dist.all_reduce(tensor, reduce_op(d.op), group=d.group, async_op=async_op)
    return work, lambda: check_reduced(tensor.clone(memory_format=torch.contiguous_format), d.all_data(), d.op)


def _chain(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensor = d.data(d.rank)
    if tensor.is_complex():  # which have no order
        return _all_reduce(d, async_op)
    first = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=d.group, async_op=async_op)
    if on_gloo() and first is not None:
        first.wait()
    work = dist.all_reduce(tensor, dist.ReduceOp.MIN, group=d.group, async_op=async_op)
    return work, lambda: check_reduced(tensor, d.all_data(), "MAX")


def _broadcast(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensor = d.data(d.rank)
    work = dist.broadcast(tensor, d.members[d.root], group=d.group, async_op=async_op)
    return work, lambda: check_equal(tensor, d.data(d.root))


def _reduce(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensor = d.data(d.rank)
    work = dist.reduce(tensor, d.members[d.root], reduce_op(d.op), group=d.group, async_op=async_op)
    return work, lambda: check_reduced(tensor, d.all_data(), d.op) if d.rank == d.root else None


def _check_each(outputs: list[torch.Tensor], expected: Callable[[int], torch.Tensor]) -> None:
    for source, output in enumerate(outputs):
        check_equal(output, expected(source))


def _all_gather(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    outputs = [torch.empty_like(d.data(r)) for r in range(d.size)]
    work = dist.all_gather(outputs, d.data(d.rank), group=d.group, async_op=async_op)
    return work, lambda: _check_each(outputs, d.data)


def _all_gather_into_tensor(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    output = torch.empty(d.size * d.count, dtype=d.dtype)
    work = dist.all_gather_into_tensor(output, d.data(d.rank), group=d.group, async_op=async_op)
    return work, lambda: check_equal(output, torch.cat(d.all_data()))


def _gather(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    outputs = [torch.empty_like(d.data(r)) for r in range(d.size)] if d.rank == d.root else None
    work = dist.gather(d.data(d.rank), outputs, d.members[d.root], group=d.group, async_op=async_op)
    return work, lambda: _check_each(outputs or [], d.data)


def _scatter(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    output = torch.empty(d.count, dtype=d.dtype)
    inputs = [d.data(d.root, r) for r in range(d.size)] if d.rank == d.root else None
    work = dist.scatter(output, inputs, d.members[d.root], group=d.group, async_op=async_op)
    return work, lambda: check_equal(output, d.data(d.root, d.rank))


def _reduce_scatter(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    output = torch.empty(d.count, dtype=d.dtype)
    inputs = [d.data(d.rank, r) for r in range(d.size)]
    work = dist.reduce_scatter(output, inputs, reduce_op(d.op), group=d.group, async_op=async_op)
    return work, lambda: check_reduced(output, d.all_data(d.rank), d.op)


def _reduce_scatter_tensor(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    output = torch.empty(d.count, dtype=d.dtype)
    inputs = torch.cat([d.data(d.rank, r) for r in range(d.size)])
    work = dist.reduce_scatter_tensor(output, inputs, reduce_op(d.op), group=d.group, async_op=async_op)
    return work, lambda: check_reduced(output, d.all_data(d.rank), d.op)


def _all_to_all(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    outputs = [torch.empty(d.count, dtype=d.dtype) for _ in range(d.size)]
    inputs = [d.data(d.rank, r) for r in range(d.size)]
    work = dist.all_to_all(outputs, inputs, group=d.group, async_op=async_op)
    return work, lambda: _check_each(outputs, lambda source: d.data(source, d.rank))


def _all_to_all_single(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    counts = [[d.draw.randrange(d.count + 1) if d.draw.random() < 0.8 else 0 for _ in d.members] for _ in d.members]
    inputs = torch.cat([d.data(d.rank, r, counts[d.rank][r]) for r in range(d.size)])
    received = [counts[source][d.rank] for source in range(d.size)]
    output = torch.empty(sum(received), dtype=d.dtype)
    work = dist.all_to_all_single(output, inputs, received, counts[d.rank], group=d.group, async_op=async_op)
    return work, lambda: check_equal(
        output, torch.cat([d.data(source, d.rank, received[source]) for source in range(d.size)])
    )


def _barrier(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    return dist.barrier(group=d.group, async_op=async_op), lambda: None


def _coalesced(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    tensors = [d.data(d.rank, part, d.count // (part + 1)) for part in range(3)]
    if async_op:
        with dist._coalescing_manager(group=d.group, async_ops=True) as work:
            for tensor in tensors:
                dist.all_reduce(tensor, reduce_op(d.op), group=d.group)
    else:
        work = dist.all_reduce_coalesced(tensors, reduce_op(d.op), group=d.group)

    def check() -> None:
        for part, tensor in enumerate(tensors):
            check_reduced(tensor, d.all_data(part, d.count // (part + 1)), d.op)

    return work, check


def _ring(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    left, right = (d.rank - 1) % d.size, (d.rank + 1) % d.size
    received = torch.empty(d.count, dtype=d.dtype)
    sending = dist.isend(d.data(d.rank), d.members[right], group=d.group, tag=d.step)
    receiving = dist.irecv(received, d.members[left], group=d.group, tag=d.step)
    assert sending is not None and receiving is not None

    def check() -> None:
        sending.wait()
        check_equal(received, d.data(left))

    if not async_op:
        receiving.wait()
    return receiving if async_op else None, check


def _to_root(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    if d.rank != d.root:
        dist.send(d.data(d.rank), d.members[d.root], group=d.group, tag=d.step)
        return None, lambda: None
    for _ in range(d.size - 1):
        received = torch.empty(d.count, dtype=d.dtype)
        source = dist.recv(received, group=d.group, tag=d.step)
        check_equal(received, d.data(d.members.index(source)))
    return None, lambda: None


def _objects(d: Drawn, async_op: bool) -> tuple[Any, Check]:
    gathered: list[Any] = [None] * d.size
    dist.all_gather_object(gathered, (d.rank, "x" * (d.count % 3000)), group=d.group)
    assert gathered == [(r, "x" * (d.count % 3000)) for r in range(d.size)]
    objects = [{"step": d.step}] if d.rank == d.root else [None]
    dist.broadcast_object_list(objects, d.members[d.root], group=d.group)
    assert objects == [{"step": d.step}]
    return None, lambda: None


KINDS: list[Callable[[Drawn, bool], tuple[Any, Check]]] = [
    *([_all_reduce] * 4),
    _strided_all_reduce,
    _chain,
    _broadcast,
    _reduce,
    _all_gather,
    _all_gather_into_tensor,
    _gather,
    _scatter,
    _reduce_scatter,
    _reduce_scatter_tensor,
    _all_to_all,
    _all_to_all_single,
    _barrier,
    _coalesced,
    _ring,
    _to_root,
    _objects,
]


class Operator:
    """Uses one group, from one thread."""

    def __init__(self, members: list[int], rank: int, group: Any, seed: int, ends_s: float) -> None:
        self.members, self.rank, self.group, self.ends_s = members, members.index(rank), group, ends_s
        self.common = random.Random(f"{seed} {members}")
        self.own = random.Random(f"{seed} {members} {rank}")
        self.pending: list[tuple[str, Any, Check]] = []
        self.steps = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Until the time is up, which all members decide together."""
        try:
            while True:
                for _ in range(BATCH):
                    self._one()
                while self.pending:
                    self._end(self.own.randrange(len(self.pending)))
                is_over = torch.tensor([time.monotonic() > self.ends_s], dtype=torch.int32)
                dist.all_reduce(is_over, dist.ReduceOp.MAX, group=self.group)
                if is_over[0] != 0:
                    return
        except BaseException as error:
            self.error = error

    def _one(self) -> None:
        self.steps += 1
        drawn = Drawn(self.common, self.members, self.rank, self.group, self.steps)
        name = f"{drawn.kind.__name__} #{self.steps} in {self.members}: {drawn.count} {drawn.dtype} {drawn.op}"
        # Coalesced calls are one operation or the other, alike on all ranks.
        chooser = self.common if drawn.kind is _coalesced else self.own
        is_async = chooser.random() < 0.6
        try:
            work, check = drawn.kind(drawn, is_async)
            if not drawn.is_exact() and drawn.kind is not _chain:
                check = lambda: None  # noqa: E731
            if is_async and work is not None:
                self.pending.append((name, work, check))
            else:
                check()
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        while len(self.pending) > self.own.choice([0, 5, 20, MOST_PENDING, MOST_PENDING]):
            self._end(self.own.choice([0, -1, self.own.randrange(len(self.pending))]))

    def _end(self, index: int) -> None:
        name, work, check = self.pending.pop(index)
        try:
            how = self.own.random()
            if how < 0.15 and hasattr(work, "is_completed") and not on_gloo():
                deadline = time.monotonic() + 200
                while not work.is_completed():
                    assert time.monotonic() < deadline, "never completed by polling"
                    time.sleep(0)
            elif how < 0.3 and hasattr(work, "get_future") and not on_gloo():
                work.get_future().then(lambda future: future.value()).wait()
            work.wait()
            check()
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def _groups_of(world_size: int) -> list[list[int]]:
    everybody = list(range(world_size))
    return [everybody, [0, 1], everybody[1:], everybody[::2], everybody[-2:]]


def _stress(rank: int, world_size: int, seconds: float, seed: int, path: str) -> dict[str, float]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=240),
    )
    begun_s = time.monotonic()
    operators = []
    for members in _groups_of(world_size):
        group = dist.new_group(members, use_local_synchronization=False)
        if rank in members:
            operators.append(Operator(members, rank, group, seed, begun_s + seconds))
    threads = [threading.Thread(target=each.run, daemon=True) for each in operators]
    for thread in threads:
        thread.start()
    # What is pending comes and goes, so the least of several looks counts, early and late.
    looks: list[tuple[float, int]] = []  # seconds, bytes
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.1)
        looks_due = 20 * min((time.monotonic() - begun_s) / seconds, 1)
        if len(looks) < looks_due:
            looks.append((time.monotonic() - begun_s, _used_bytes()))
        for each in operators:
            if each.error is not None:
                raise each.error
    looks.append((time.monotonic() - begun_s, _used_bytes()))
    late = min(used for when, used in looks if when >= 0.8 * seconds)
    early = min((used for when, used in looks if 0.1 * seconds <= when <= 0.3 * seconds), default=late)
    for each in operators:
        if each.error is not None:
            raise each.error
    dist.barrier()
    dist.destroy_process_group()
    return {
        "operations": sum(each.steps for each in operators),
        "early_mib": early / 2**20,
        "late_mib": late / 2**20,
        "seconds": time.monotonic() - begun_s,
    }


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33, to see what is allocated")
def test_random_operations(tmp_path: Path) -> None:
    seconds = float(os.environ.get("HORON_STRESS_SECONDS", "600" if STRESS else "8"))
    world_size = 8 if STRESS else 4
    seed = int(os.environ.get("HORON_STRESS_SEED", "1"))
    outcomes = run_fresh_processes(
        _stress, world_size, seconds, seed, str(tmp_path / "store"), init=False, timeout=2 * seconds + 100
    )
    assert_clean_exits(outcomes)
    for outcome in outcomes:
        result = outcome.result
        print(f"rank {outcome.rank}: " + ", ".join(f"{name} {value:.1f}" for name, value in result.items()))
        growth = result["late_mib"] - result["early_mib"]
        # In a few seconds what grows is caches: the flight recorder's entries, and what was not touched before.
        assert not STRESS or growth < 20, f"rank {outcome.rank} grew by {growth:.0f} MiB: {result}"
