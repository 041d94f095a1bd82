"""Process groups: subgroups, several at once, threads, destroy and re-init, split, sequence numbers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    BACKEND,
    TORCH_VERSION,
    assert_clean_exits,
    expect_error,
    gloo_lacks,
    needs_torch_215,
    on_gloo,
    run_fresh_processes,
    run_ranks,
    store,
)


def _backend_of(group: dist.ProcessGroup | None = None) -> Any:
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu"))


def _check_sum(group: dist.ProcessGroup | None, members: list[int], rank: int, count: int = 10) -> None:
    tensor = torch.full((count,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == sum(members)).all(), f"group {members}: {tensor[0].item()}"


def _identity(rank: int, world_size: int) -> None:
    assert dist.get_rank() == rank and dist.get_world_size() == world_size
    assert dist.get_backend() == BACKEND
    assert _backend_of().name() == BACKEND
    assert _backend_of().rank() == rank and _backend_of().size() == world_size


def test_identity() -> None:
    run_ranks(_identity, 2)


def _all_subgroups(rank: int, world_size: int) -> None:
    groups = {}
    for size in range(1, world_size + 1):
        for members in combinations(range(world_size), size):
            groups[members] = dist.new_group(list(members))
    for _ in range(3):
        for members, group in groups.items():
            if rank in members:
                for count in (1, 70001):
                    _check_sum(group, list(members), rank, count)
                assert dist.get_group_rank(group, rank) == members.index(rank)
    _check_sum(None, list(range(world_size)), rank)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_subgroup(world_size: int) -> None:
    run_ranks(_all_subgroups, world_size, timeout=90)


def _overlapping_async(rank: int, world_size: int) -> None:
    pairs = [[0, 1], [1, 2], [2, 0]]
    groups = [dist.new_group(pair) for pair in pairs]
    started = []
    order = list(range(3)) if rank != 1 else [1, 0, 2]  # Groups are independent: ranks may use them in any order.
    for step in range(20):
        for index in order:
            if rank in pairs[index]:
                tensor = torch.full((1 + 1000 * (step % 3),), float(rank))
                started.append((dist.all_reduce(tensor, group=groups[index], async_op=True), tensor, sum(pairs[index])))
    for work, tensor, expected in started:
        work.wait()
        assert (tensor == expected).all()


def test_overlapping_groups_in_different_orders() -> None:
    run_ranks(_overlapping_async, 3)


def _in_threads(targets: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def _threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(4)]
    members = list(range(world_size))

    def use(index: int) -> None:
        for step in range(100):
            tensor = torch.full((1 + 5000 * (step % 2),), float(rank + index))
            dist.all_reduce(tensor, group=groups[index])
            assert (tensor == sum(members) + world_size * index).all(), f"group {index}, step {step}"
            if step % 10 == 0:
                dist.barrier(group=groups[index])

    _in_threads([lambda i=i: use(i) for i in range(4)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_used_from_several_threads(world_size: int) -> None:
    run_ranks(_threads, world_size)


def _threads_p2p(rank: int, world_size: int) -> None:
    def exchange(tag: int) -> None:
        for step in range(50):
            received = torch.zeros(1000)
            work = dist.isend(torch.full((1000,), float(tag * 1000 + step)), 1 - rank, tag=tag)
            dist.recv(received, 1 - rank, tag=tag)
            work.wait()
            assert (received == tag * 1000 + step).all()

    _in_threads([lambda t=t: exchange(t) for t in range(4)])


def test_point_to_point_from_several_threads() -> None:
    run_ranks(_threads_p2p, 2)


def _local_synchronization(rank: int, world_size: int) -> None:
    members = [0, 2]
    if rank in members:  # Rank 1 takes no part and does not hear of it.
        group = dist.new_group(members, use_local_synchronization=True)
        _check_sum(group, members, rank)
    _check_sum(None, [0, 1, 2], rank)


def test_use_local_synchronization() -> None:
    run_ranks(_local_synchronization, 3)


def _destroy_one(rank: int, world_size: int) -> None:
    members = list(range(world_size))
    first, second = dist.new_group(), dist.new_group()
    _check_sum(first, members, rank)
    dist.destroy_process_group(first)
    if not on_gloo():  # Which goes on with a destroyed group.
        expect_error(lambda: dist.all_reduce(torch.ones(3), group=first))
    _check_sum(second, members, rank)
    _check_sum(None, members, rank)
    for _ in range(20):
        group = dist.new_group()
        _check_sum(group, members, rank)
        dist.destroy_process_group(group)
    _check_sum(second, members, rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_destroying_one_group_leaves_the_others(world_size: int) -> None:
    run_ranks(_destroy_one, world_size)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _reinit(rank: int, world_size: int, path: str, times: int) -> tuple[int, int]:
    before = (0, 0)
    for turn in range(times):
        file = dist.FileStore(f"{path}-{turn}", world_size)
        dist.init_process_group(BACKEND, store=file, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        for count in (1, 70001):
            _check_sum(None, list(range(world_size)), rank, count)
        if turn % 10 == 0:
            work = dist.all_reduce(torch.ones(5), async_op=True)
            work.wait()
        dist.destroy_process_group()
        if turn == 10:
            before = (_descriptors(), threading.active_count())
    return _descriptors() - before[0], threading.active_count() - before[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_destroy_and_reinit_a_hundred_times(world_size: int, tmp_path: Any) -> None:
    for rank, (descriptors, threads) in enumerate(
        run_ranks(_reinit, world_size, str(tmp_path / "store"), 100, init=False, timeout=120)
    ):
        assert descriptors < 20, f"rank {rank} leaked {descriptors} descriptors"
        assert threads < 10, f"rank {rank} leaked {threads} threads"


def _reinit_one_store(rank: int, world_size: int, path: str) -> None:
    # An elastic restart comes back to the same TCPStore with the same group names.
    base = dist.FileStore(path, world_size)
    for turn in range(5):
        dist.init_process_group(
            BACKEND,
            store=dist.PrefixStore(f"attempt{turn}", base),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        _check_sum(None, list(range(world_size)), rank)
        dist.destroy_process_group()


def test_reinit_over_one_store(tmp_path: Any) -> None:
    run_ranks(_reinit_one_store, 2, str(tmp_path / "store"), init=False)


def _split(rank: int, world_size: int) -> None:
    parent = _backend_of()
    assert parent.supports_splitting, "splitting is not supported"
    for _ in range(3):  # The same name again and again, as default names of split_group do.
        color = [0, 2] if rank in (0, 2) else [1]
        options = parent.options
        assert options is not None
        child = parent.split(dist.PrefixStore("split", store()), color, options)
        assert child.size() == len(color) and child.rank() == color.index(rank)
        tensor = torch.full((1000,), float(rank))
        work = child.allreduce([tensor], dist.AllreduceOptions())
        if work is not None:
            work.wait()
        assert (tensor == sum(color)).all()
        child.shutdown()
    _check_sum(None, list(range(world_size)), rank)


def _has_split(rank: int, world_size: int) -> bool:
    return hasattr(_backend_of(), "split")


def test_backend_split() -> None:
    gloo_lacks("no options that split takes, and no counter in its keys")
    if TORCH_VERSION < (2, 15) and not any(run_ranks(_has_split, 1)):
        pytest.skip("Backend.split has no Python binding before torch 2.15, and the backend adds none")
    run_ranks(_split, 3)


def _split_without_the_others(rank: int, world_size: int) -> None:
    # Nothing but the members has to know of a split; the next one, of all ranks, must not be put out by it.
    everybody = list(range(world_size))
    splits = [[0, 1], everybody] if rank < 2 else [everybody]
    for ranks in splits:
        child = dist.group.WORLD.split_group(ranks, timeout=timedelta(seconds=10), group_name=f"split of {len(ranks)}")
        tensor = torch.full((1000,), float(rank))
        child.allreduce([tensor]).wait()
        assert (tensor == sum(ranks)).all()
        child.shutdown()


def test_split_without_the_others() -> None:
    run_ranks(_split_without_the_others, 3)


def _splits_in_threads(rank: int, world_size: int) -> None:
    # Two splits at once, begun in another order on each rank: they are told apart by their names.
    def split(name: str, delay_s: float) -> float:
        time.sleep(delay_s)
        child = dist.group.WORLD.split_group([0, 1], timeout=timedelta(seconds=60), group_name=name)
        tensor = torch.full((1000,), float(len(name)))
        child.allreduce([tensor]).wait()
        child.shutdown()
        return tensor[0].item()

    with ThreadPoolExecutor(2) as threads:
        sums = [threads.submit(split, "x" * (i + 1), 0.3 * ((i + rank) % 2)) for i in range(2)]
        assert [value.result() for value in sums] == [2.0, 4.0]


def test_splits_in_threads() -> None:
    run_ranks(_splits_in_threads, 2)


def _tcp_store(rank: int, world_size: int, path: str) -> dist.Store:
    """A TCPStore at a free port, which rank 0 tells the others in a FileStore."""
    files = dist.FileStore(path, world_size)
    if rank == 0:
        tcp = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        files.set("port", str(tcp.port))
        return tcp
    return dist.TCPStore("127.0.0.1", int(files.get("port")), world_size, False, wait_for_workers=False)


def _splits_in_threads_over_tcp(rank: int, world_size: int, path: str) -> None:
    tcp = _tcp_store(rank, world_size, path)
    dist.init_process_group(BACKEND, store=tcp, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    for _ in range(6):
        _splits_in_threads(rank, world_size)
    _late_for_a_group(rank, world_size)
    dist.destroy_process_group()


def _late_for_a_group(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(2.5)
    _check_sum(dist.new_group([0, 1]), [0, 1], rank)


def test_waiting_at_a_tcp_store_holds_up_nobody(tmp_path: Any) -> None:
    outcomes = run_fresh_processes(_splits_in_threads_over_tcp, 2, str(tmp_path / "store"), init=False)
    assert_clean_exits(outcomes)
    for outcome in outcomes:
        assert "waitForInput" not in outcome.stderr, outcome.stderr


def _split_options(rank: int, world_size: int) -> None:
    # PyTorch's own test of Gloo: a split leaves its parent's options alone, also for the next one.
    options = _backend_of().options
    name, timeout = options.group_name, options._timeout
    for seconds in (22, 33):
        members = [peer for peer in range(world_size) if peer % 2 == rank % 2]
        child = dist.group.WORLD.split_group(
            members, timeout=timedelta(seconds=seconds), group_name=f"ranks {members}, {seconds} s"
        )
        child_options = child._get_backend(torch.device("cpu")).options
        assert child_options._timeout == timedelta(seconds=seconds)
        assert list(child_options.global_ranks_in_group) == members
        assert (options.group_name, options._timeout) == (name, timeout)
        assert list(options.global_ranks_in_group) == []
        child.shutdown()


@needs_torch_215
def test_split_leaves_the_parents_options_alone() -> None:
    run_ranks(_split_options, 4)


def _merge(rank: int, world_size: int) -> None:
    # Two worlds of two become one of four. Who comes first gets the lower rank.
    meeting = dist.PrefixStore("merge", store())
    pair = dist.group.WORLD.split_group([rank // 2 * 2, rank // 2 * 2 + 1], group_name=f"pair {rank // 2}")
    merged = pair.merge_remote_group(meeting, 4, timedelta(seconds=20), group_name="four")
    tensor = torch.full((1000,), float(rank))
    merged.allreduce([tensor]).wait()
    assert (tensor == 6).all() and merged.size() == 4
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    merged.allgather([ranks], [torch.tensor([merged.rank()])]).wait()
    assert [int(r) for r in ranks] == [0, 1, 2, 3]
    merged.shutdown()
    pair.shutdown()


def test_merge() -> None:
    run_ranks(_merge, 4)


def _sequence_numbers(rank: int, world_size: int) -> None:
    backend = _backend_of()
    backend._set_sequence_number_for_group()
    first = backend._get_sequence_number_for_group()
    for _ in range(5):
        _check_sum(None, [0, 1], rank)
    assert backend._get_sequence_number_for_group() == first + 5
    numbers: list[Any] = [None, None]
    dist.all_gather_object(numbers, backend._get_sequence_number_for_group())
    assert numbers[0] == numbers[1]


def test_sequence_numbers() -> None:
    run_ranks(_sequence_numbers, 2)


def _timeout_option(rank: int, world_size: int) -> None:
    import copy

    options = _backend_of().options
    assert options._timeout == timedelta(seconds=50)
    assert copy.deepcopy(options)._timeout == timedelta(seconds=50)


def test_options_carry_the_timeout_and_deepcopy() -> None:
    gloo_lacks("options do not deepcopy")
    run_ranks(_timeout_option, 2)


def _bad_timeouts(rank: int, world_size: int) -> None:
    for timeout in (timedelta(seconds=-1), timedelta.max):
        with pytest.raises(ValueError, match="timeout of a group: expected more than 0 ms"):
            dist.new_group(timeout=timeout)
    _check_sum(dist.new_group(timeout=timedelta(days=365 * 100)), [0, 1], rank)


def test_timeouts_out_of_range() -> None:
    gloo_lacks("says it in its own words")
    run_ranks(_bad_timeouts, 2)


def _shutdown_twice(rank: int, world_size: int) -> None:
    group = dist.new_group()
    _check_sum(group, [0, 1], rank)
    backend = _backend_of(group)
    backend.shutdown()
    backend.shutdown()
    backend.abort()
    _check_sum(None, [0, 1], rank)


def test_shutdown_and_abort_are_idempotent() -> None:
    run_ranks(_shutdown_twice, 2)


def _abort_wakes(rank: int, world_size: int) -> None:
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        future = work.get_future()
        timer = threading.Timer(0.3, _backend_of(group).abort)
        timer.start()
        expect_error(work.wait, within_s=10)
        expect_error(future.wait, within_s=10)
        timer.join()
        store().set("aborted", "1")
    store().wait(["aborted"])
    _check_sum(None, [0, 1], rank)


def test_abort_wakes_waiters_and_fails_futures() -> None:
    gloo_lacks("futures of aborted operations hang")
    run_ranks(_abort_wakes, 2)
