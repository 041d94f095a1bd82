"""Many small asynchronous operations: started by the caller, ended by whoever waits, polls or comes by."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, gloo_lacks, on_gloo, run_fresh_processes, run_ranks, store
from operations import outcome

SMALL = 1024
"""Elements of float32: 4 KiB."""
LARGE = 70001
MANY = 1000
SOON_S = 15.0
"""Within which everything that is expected to end must have ended."""


def _sum_of(world_size: int, step: int) -> float:
    return float(sum(range(world_size)) + world_size * (step % 100))


def _issue(rank: int, step: int, count: int = SMALL) -> tuple[dist.Work, torch.Tensor]:
    tensor = torch.full((count,), float(rank + step % 100))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work, tensor


def _poll(work: dist.Work) -> None:
    deadline = time.monotonic() + SOON_S
    while not work.is_completed():
        assert time.monotonic() < deadline, "never completed by polling"


def _many(rank: int, world_size: int, how: str) -> None:
    started = [_issue(rank, step) for step in range(MANY)]
    works = [work for work, _ in started]
    if how == "in order":
        for work in works:
            work.wait()
    elif how == "in reverse order":
        for work in reversed(works):
            work.wait()
    elif how == "only the last":
        works[-1].wait()
    elif how == "not at all":
        dist.barrier()
    elif how == "polling each":
        for work in works:
            _poll(work)
    elif how == "polling the last":
        _poll(works[-1])
    elif how == "with a limit":
        for work in works:
            work.wait(timedelta(seconds=SOON_S))
    elif how == "each rank its own way":
        ways: list[Callable[[], object]] = [lambda: works[-1].wait(), lambda: _poll(works[-1]), dist.barrier]
        ways[rank % 3]()
        if rank % 3 != 2:
            dist.barrier()
    for step, (work, tensor) in enumerate(started):
        assert (tensor == _sum_of(world_size, step)).all(), f"operation {step}"
        if not on_gloo():
            assert work.is_completed() and work.is_success()


HOWS = [
    "in order",
    "in reverse order",
    "only the last",
    "not at all",
    "polling each",
    "polling the last",
    "with a limit",
    "each rank its own way",
]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_thousand(world_size: int, how: str) -> None:
    if how in ("only the last", "polling the last", "each rank its own way"):
        gloo_lacks("completes them in any order")
    run_ranks(_many, world_size, how)


def _callbacks(rank: int, world_size: int, every: int) -> None:
    seen: list[tuple[int, int]] = []  # step and thread
    futures, started = [], []

    def callback(step: int, future: torch.futures.Future[list[torch.Tensor]]) -> float:
        seen.append((step, threading.get_ident()))
        return future.value()[0].sum().item()

    for step in range(MANY):
        work, tensor = _issue(rank, step)
        started.append((work, tensor))
        if step % every == 0:
            futures.append(work.get_future().then(functools.partial(callback, step)))
    for index, future in enumerate(futures):
        assert future.wait() == SMALL * _sum_of(world_size, index * every)
    for step, (work, tensor) in enumerate(started):
        work.wait()
        assert (tensor == _sum_of(world_size, step)).all(), f"operation {step}"
    assert sorted(step for step, _ in seen) == list(range(0, MANY, every))
    # One thread calls them as the operations end. But PyTorch calls those of a future that is done already at once, on
    # the thread that adds them, while an earlier one may still wait for the GIL.
    for thread in {thread for _, thread in seen}:
        steps = [step for step, caller in seen if caller == thread]
        assert on_gloo() or steps == sorted(steps), "callbacks out of order"


@pytest.mark.parametrize("every", [1, 7, 90])
@pytest.mark.parametrize("world_size", [2, 4])
def test_callbacks_between_plain_ones(world_size: int, every: int) -> None:
    run_ranks(_callbacks, world_size, every)


def _future_while_the_ring_is_full(rank: int, world_size: int) -> None:
    # The progress thread gets what was started at a moment when the next one has no room.
    for room in range(40, 80):
        works = [_issue(rank, step)[0] for step in range(room)]
        dist.barrier(async_op=True)
        future = works[0].get_future()
        last, tensor = _issue(rank, 7)
        last.wait()
        future.wait()
        assert (tensor == _sum_of(world_size, 7)).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_future_while_the_ring_is_full(world_size: int) -> None:
    run_ranks(_future_while_the_ring_is_full, world_size)


def _chained(rank: int, world_size: int) -> None:
    for count in (1, SMALL, LARGE):
        for length in (2, 5, 20):
            tensor = torch.full((count,), 1.0)
            works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True) for _ in range(length - 1)]
            works.append(dist.all_reduce(tensor, async_op=True))
            works[-1].wait()
            assert (tensor == world_size).all(), f"{length} on {count} elements: {tensor[0].item()}"


def _chain_of_kinds(rank: int, world_size: int) -> None:
    n = world_size
    for step in range(50):
        count = (1, 64, 1024, 5000)[step % 4]
        tensor = torch.full((count,), float(rank))
        gathered = torch.zeros(n * count)
        part = torch.zeros(count)
        dist.all_reduce(tensor, async_op=True)  # the sum of the ranks
        dist.all_gather_into_tensor(gathered, tensor, async_op=True)
        dist.reduce_scatter_tensor(part, gathered, async_op=True)  # n times that
        dist.broadcast(part, n - 1, async_op=True)
        other = torch.full((count,), 1.0)
        dist.all_reduce(other, async_op=True)
        last = dist.all_reduce(part[: count // 2 + 1], async_op=True)  # n times that again
        last.wait()
        total = float(sum(range(n)))
        assert (tensor == total).all() and (gathered == total).all()
        assert (part[: count // 2 + 1] == total * n * n).all() and (part[count // 2 + 1 :] == total * n).all()
        assert (other == n).all()


def _chained_in_views(rank: int, world_size: int) -> None:
    # What a call copies because the engine wants contiguous memory, is the tensor's contents in the call's turn.
    n = world_size
    for count in (4, 40, 300):
        matrix = torch.ones(count, count)
        works = [
            dist.all_reduce(matrix.t(), async_op=True),
            dist.all_reduce(matrix, async_op=True),
            dist.all_reduce(matrix[:, 1:], async_op=True),
            dist.all_reduce(matrix[:, 1:], async_op=True),
            dist.all_reduce(matrix.t(), async_op=True),
        ]
        for work in works:
            work.wait()
        assert (matrix[:, 0] == n**3).all(), matrix[0, 0].item()
        assert (matrix[:, 1:] == n**5).all(), matrix[0, 1].item()
        gathered = torch.zeros(n * count)
        column = matrix[:, 0]
        column.fill_(1.0)
        dist.all_reduce(column, async_op=True)
        dist.all_gather_into_tensor(gathered, column, async_op=True).wait()
        assert (gathered == n).all(), gathered[0].item()


@pytest.mark.parametrize("fn", [_chained, _chain_of_kinds, _chained_in_views])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_reads_what_an_earlier_one_writes(world_size: int, fn: Callable[[int, int], None]) -> None:
    gloo_lacks("runs them at the same time")
    run_ranks(fn, world_size)


def _alternating(rank: int, world_size: int) -> None:
    started = [_issue(rank, step, LARGE if step % 3 == 1 else SMALL) for step in range(300)]
    for step in range(0, 300, 2):
        started[step][0].wait()
    dist.barrier()
    for step, (work, tensor) in enumerate(started):
        work.wait()
        assert (tensor == _sum_of(world_size, step)).all(), f"operation {step}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_small_and_large_alternate(world_size: int) -> None:
    run_ranks(_alternating, world_size)


def _groups_in_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    errors: list[BaseException] = []

    def use(index: int) -> None:
        try:
            generator = torch.Generator().manual_seed(index)  # the same on every rank
            own = torch.Generator().manual_seed(100 * index + rank)
            started: list[tuple[dist.Work, torch.Tensor, float]] = []
            for step in range(400):
                count = (1, SMALL, LARGE, 64)[int(torch.randint(0, 4, (), generator=generator))]
                tensor = torch.full((count,), float(rank + step))
                work = dist.all_reduce(tensor, group=groups[index], async_op=True)
                started.append((work, tensor, float(sum(range(world_size)) + world_size * step)))
                what = int(torch.randint(0, 12, (), generator=own))
                some = started[int(torch.randint(0, len(started), (), generator=own))]
                if what == 0:
                    some[0].wait()
                    assert (some[1] == some[2]).all()
                elif what == 1:
                    some[0].is_completed()
                elif what == 2:
                    some[0].get_future()
                elif what == 3:
                    some[0].wait(timedelta(seconds=SOON_S))
            for work, tensor, expected in started:
                work.wait()
                assert (tensor == expected).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(45)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_groups_from_several_threads(world_size: int) -> None:
    run_ranks(_groups_in_threads, world_size)


def _waits_by_threads(rank: int, world_size: int) -> None:
    started = [_issue(rank, step) for step in range(200)]
    wrong: list[int] = []

    def wait_all(order: list[int]) -> None:
        for step in order:
            work, tensor = started[step]
            work.wait()
            if not (tensor == _sum_of(world_size, step)).all():
                wrong.append(step)

    orders = [list(range(200)), list(reversed(range(200))), list(range(0, 200, 3))]
    threads = [threading.Thread(target=wait_all, args=(order,), daemon=True) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(45)
        assert not thread.is_alive(), "a thread hangs"
    assert not wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_threads_wait_for_the_same_ones(world_size: int) -> None:
    run_ranks(_waits_by_threads, world_size)


def _needs_nothing_more(rank: int, world_size: int, kind: str, number: int) -> None:
    # Rank 1 has issued its part and does something else: what rank 0 waits for must not need it again.
    other = dist.new_group()
    for _ in range(3):
        works = []
        for _ in range(number):
            tensor = torch.ones(SMALL)
            work = (
                dist.broadcast(tensor, 0, async_op=True)
                if kind == "broadcast"
                else dist.all_reduce(tensor, async_op=True)
            )
            works.append(work)
        if rank == 0:
            for work in works:
                work.wait()
        dist.all_reduce(torch.ones(1), group=other)
        for work in works:
            work.wait()


@pytest.mark.parametrize("number", [50, 58, 61, 64, 200])
@pytest.mark.parametrize("kind", ["broadcast", "all_reduce"])
def test_what_was_issued_needs_nobody_who_is_busy_elsewhere(kind: str, number: int) -> None:
    run_ranks(_needs_nothing_more, 2, kind, number, timeout=30, group_timeout_s=10)


def _never_joined(rank: int, world_size: int, how: str) -> None:
    dist.barrier()
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=40))
        return
    works = [_issue(rank, step)[0] for step in range(3)]

    def use() -> None:
        if how == "wait":
            works[0].wait()
        elif how == "wait for the last":
            works[2].wait()
        elif how == "wait with a longer limit":
            works[0].wait(timedelta(seconds=30))
        elif how == "poll":
            _poll(works[2])
            works[2].wait()
        elif how == "future":
            works[0].get_future().wait()
        else:
            dist.barrier()

    message = expect_error(use, within_s=SOON_S)
    store().set("seen", "1")
    assert "rank 1" in message.lower(), message
    for work in works:
        expect_error(work.wait, within_s=SOON_S)
        assert work.is_completed() and outcome(work) is not None


@pytest.mark.parametrize(
    "how", ["wait", "wait for the last", "wait with a longer limit", "poll", "future", "a synchronous one"]
)
def test_a_peer_that_never_joins_is_an_error_at_the_deadline(how: str) -> None:
    gloo_lacks("the error is another")
    assert_clean_exits(run_fresh_processes(_never_joined, 2, how, group_timeout_s=2, timeout=40))


def _killed_while_polled(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        store().wait(["in"])
        os.kill(os.getpid(), signal.SIGKILL)
    works = [_issue(rank, step)[0] for step in range(3)]
    store().set("in", "1")
    _poll(works[2])
    message = expect_error(works[0].wait)
    assert "rank 1" in message.lower() and "died" in message.lower(), message


def test_polling_ends_when_a_peer_dies() -> None:
    gloo_lacks("the error is another")
    assert_clean_exits(run_fresh_processes(_killed_while_polled, 2, timeout=40), [0, -signal.SIGKILL])


def _interrupted(rank: int, world_size: int, how: str) -> None:
    dist.barrier()
    if rank == 1:
        store().wait(["pid"])
        time.sleep(0.5)
        os.kill(int(store().get("pid")), signal.SIGINT)
        store().wait(["interrupted"], timedelta(seconds=20))
        return
    works = [_issue(rank, step)[0] for step in range(3)]
    store().set("pid", str(os.getpid()))
    try:
        works[2].wait() if how == "wait" else dist.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        store().set("interrupted", "1")
        return
    raise AssertionError("the call returned")


@pytest.mark.parametrize("how", ["wait", "synchronous"])
def test_ctrl_c_while_earlier_ones_are_waited_for(how: str) -> None:
    gloo_lacks("does not look at signals")
    assert_clean_exits(run_fresh_processes(_interrupted, 2, how, timeout=40))


def _ends_with_pending(rank: int, world_size: int, how: str) -> None:
    dist.barrier()
    number = 200 if how.startswith("all") else (200 if rank == 0 else 0)
    started = [_issue(rank, step) for step in range(number)]
    globals()["kept"] = started
    if "destroy" in how:
        dist.destroy_process_group()
        if how.startswith("all"):
            for step, (work, tensor) in enumerate(started):
                assert work.is_completed() and work.is_success()
                assert (tensor == _sum_of(world_size, step)).all(), f"operation {step}"
    elif "abort" in how and rank == 0:
        group = dist.group.WORLD
        assert group is not None
        group._get_backend(torch.device("cpu")).abort()
        for work, _ in started:
            assert work.is_completed()
            expect_error(work.wait, within_s=SOON_S)


@pytest.mark.parametrize("how", ["all, destroy", "all, exit", "one, exit", "one, abort"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_end_with_operations_started(world_size: int, how: str) -> None:
    gloo_lacks("aborts or hangs at exit with operations pending")
    assert_clean_exits(run_fresh_processes(_ends_with_pending, world_size, how, timeout=40))


def _forked(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        works = [_issue(rank, step)[0] for step in range(3)]
        child = os.fork()
        if child == 0:  # must not touch what the parent is in the middle of
            refused = 0
            try:
                time.sleep(0.5)  # the other rank's part is there by now: nothing would have to be waited for
                for call in (works[0].wait, works[1].is_completed, works[2].get_future):
                    try:
                        call()
                    except RuntimeError as error:
                        refused += "fork" in str(error)
            finally:
                os._exit(3 - refused)
        store.set("forked", "")
        deadline = time.monotonic() + SOON_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("the child hangs")
            time.sleep(0.01)
        assert ended[1] == 0, "the child was not told that it is a fork"
    else:
        store.wait(["forked"])
        works = [_issue(rank, step)[0] for step in range(3)]
    for _ in range(100):
        works.append(_issue(rank, 1)[0])
    for work in works:
        work.wait()
    _many(rank, world_size, "in order")


def test_a_forked_child_disturbs_nothing() -> None:
    gloo_lacks("hangs in the child")
    run_ranks(_forked, 2)
