"""One-sided windows (torch 2.14): puts, signals, mapped tensors, refusals, deaths, timeouts, exits, lifetimes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import horon
import pytest
import torch
import torch.distributed as dist
from harness import (
    TORCH_VERSION,
    Cases,
    assert_clean_exits,
    expect_error,
    needs_torch_214,
    on_gloo,
    run_fresh_processes,
    run_ranks,
    store,
)
from reference import DTYPES, make_input

pytestmark = [needs_torch_214, pytest.mark.skipif(on_gloo(), reason="Gloo has no windows")]

if TORCH_VERSION >= (2, 14):
    from torch._C._distributed_c10d import WaitSignalOptions, WindowAccessType
    from torch.distributed import _new_window, _supports_window

# One element, odd, a page and more, larger than a core's caches.
SIZES = [1, 17, 4099, 700_001]
DEATH_S = 10.0


def _window(*size: int, dtype: torch.dtype = torch.float32, group: Any = None) -> tuple[Any, torch.Tensor]:
    tensor = horon.zeros(*size, dtype=dtype)
    return _new_window(tensor, group), tensor


def _impatient(milliseconds: int = 200) -> Any:
    options = WaitSignalOptions()
    options.timeout = timedelta(milliseconds=milliseconds)
    return options


def _all_pairs(rank: int, n: int) -> None:
    assert _supports_window()
    cases = Cases()
    for dtype in DTYPES:
        for count in SIZES if dtype in (torch.float32, torch.uint8) else SIZES[:3]:
            with cases(f"{dtype} n={count}"):
                window, mine = _window(n, count, dtype=dtype)
                for target in range(n):
                    window.put(make_input(rank, count, dtype, seed=target), target, rank * count, target % 2 == 1)
                for source in range(n):
                    window.wait_signal(source, False)
                    expected = make_input(source, count, dtype, seed=rank)
                    assert torch.equal(mine[source].view(torch.uint8), expected.view(torch.uint8)), f"from {source}"
                dist.barrier()
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_puts_between_all_pairs(world_size: int) -> None:
    run_ranks(_all_pairs, world_size, timeout=120)


def _forms(rank: int, n: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    window, mine = _window(100)
    # Sources need not lie in the arena, nor be contiguous.
    source = (torch.arange(200.0) + rank).view(100, 2)[:, 1]
    assert not source.is_contiguous()
    for is_async in (False, True):
        mine.zero_()
        dist.barrier()
        put = window.put(source, right, 0, is_async)
        assert put.is_completed() and put.wait()
        work = window.wait_signal(left, is_async)
        assert work.wait() and work.is_completed()
        assert torch.equal(mine, torch.arange(1.0, 201, 2) + left)
        dist.barrier()
    # A put signals; signals are counted and taken one by one.
    for i in range(5):
        window.put(torch.full((1,), float(i)), right, i, False)
    window.signal(right, False)
    window.signal(right, True).wait()
    for _ in range(7):
        window.wait_signal(left, False)
    assert mine[:5].tolist() == [0, 1, 2, 3, 4]
    expect_error(lambda: window.wait_signal(left, False, _impatient()), "Timed out", f"rank {left}")
    dist.barrier()
    # An empty put is a signal.
    window.put(torch.empty(0), right, 100, False)
    window.wait_signal(left, False)
    # Gradients and conjugates.
    with torch.no_grad():
        window.put(torch.ones(3, requires_grad=True), right, 0, False)
    window.wait_signal(left, False)
    assert window.get_attr(right).access_type == WindowAccessType.UNIFIED
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_synchronous_and_asynchronous_forms(world_size: int) -> None:
    run_ranks(_forms, world_size)


def _asynchronous_waits(rank: int, n: int) -> None:
    peer = 1 - rank
    window, _ = _window(1)
    first, second = window.wait_signal(peer, True), window.wait_signal(peer, True)
    assert not first.is_completed() and not second.is_completed()
    expect_error(first.get_future, "wait()")
    expect_error(lambda: first.wait(timedelta(milliseconds=50)), "Timed out", f"rank {peer}", "wait again")
    dist.barrier()
    window.signal(peer, False)
    dist.barrier()
    assert not second.is_completed()  # the first signal is the first one's
    assert first.is_completed()
    assert first.get_future().wait() == []
    dist.barrier()  # the peer has looked, too
    window.signal(peer, False)
    assert second.wait()
    # One that nobody waits for takes its signal all the same.
    window.wait_signal(peer, True)
    window.signal(peer, False)
    window.signal(peer, False)
    window.wait_signal(peer, False)
    expect_error(lambda: window.wait_signal(peer, False, _impatient()), "Timed out")
    # The deadline runs from the call; then it is over, and takes nothing.
    late = window.wait_signal(peer, True, _impatient(50))
    dist.barrier()
    time.sleep(0.1)
    assert late.is_completed()
    dist.barrier()
    window.signal(peer, False)
    expect_error(late.wait, "Timed out", "50ms")
    window.wait_signal(peer, False)


def test_asynchronous_waits() -> None:
    run_ranks(_asynchronous_waits, 2)


def _sizes_differ(rank: int, n: int) -> None:
    window, _mine = _window(rank, 3)  # rank 0 has nothing
    for target in range(n):
        mapped = window.map_remote_tensor(target)
        assert mapped.shape == (target, 3) and mapped.dtype == torch.float32
        if target > 0:
            window.put(torch.full((3,), float(rank)), target, 3 * (target - 1), False)
        else:
            expect_error(lambda: window.put(torch.ones(1), 0, 0, False), "ValueError", "window of 0 elements")
            window.signal(0, False)
    for source in range(n):
        window.wait_signal(source, False)
    dist.barrier()
    deep = horon.zeros(*([1] * 9), 5)  # more dimensions than travel
    window = _new_window(deep)
    assert window.map_remote_tensor(0).shape == (5,)


def test_sizes_may_differ() -> None:
    run_ranks(_sizes_differ, 3)


def _mismatches(rank: int, n: int) -> None:
    cases = Cases()
    outside = torch.zeros(4)
    good = horon.zeros(4)
    wrong = [
        ("dtype", lambda: _new_window(good.to(torch.float64) if rank == 1 else good), []),
        ("another dtype", lambda: _new_window(horon.zeros(4, dtype=torch.int16) if rank else good), ["dtype differs"]),
        ("outside", lambda: _new_window(outside if rank == 1 else good), ["rank 1", "horon.empty"]),
        ("outside on all", lambda: _new_window(outside), ["arena", "horon.empty"]),
        ("strided", lambda: _new_window(horon.zeros(4, 4)[:, 1] if rank else good), ["contiguous"]),
        ("without", lambda: _new_window(None if rank else good), ["new_window_without_tensor"]),
        ("all_reduce", lambda: _new_window(good) if rank else dist.all_reduce(good), ["all_reduce", "new_window"]),
    ]
    for name, call, words in wrong:
        with cases(name):
            expect_error(call, "rank", *words)
            window = _new_window(good)
            window.put(torch.full((4,), 1.0 + rank), (rank + 1) % n, 0, False)
            window.wait_signal((rank - 1) % n, False)
            assert (good == 1 + (rank - 1) % n).all()
            dist.barrier()
    cases.check()


def test_ranks_that_disagree_all_get_the_error() -> None:
    run_ranks(_mismatches, 3)


def _bad_arguments(rank: int, n: int) -> None:
    window, mine = _window(10)
    peer = 1 - rank
    refused = [
        (lambda: window.put(torch.ones(11), peer, 0, False), ["11 elements", "10 elements"]),
        (lambda: window.put(torch.ones(3), peer, 8, False), ["offset 8", "10 elements"]),
        (lambda: window.put(torch.ones(3), peer, -1, False), ["offset -1"]),
        (lambda: window.put(torch.ones(3, dtype=torch.float64), peer, 0, False), ["dtype", "double", "float"]),
        (lambda: window.put(torch.ones(3), 2, 0, False), ["rank 2 is not a rank"]),
        (lambda: window.put(torch.ones(3), -1, 0, False), ["rank -1"]),
        (lambda: window.put(torch.ones(3), 2**32, 0, False), ["rank 4294967296"]),
        (lambda: window.put(torch.ones(3).to_sparse(), peer, 0, False), ["dense"]),
        (lambda: window.put(torch.ones(3, device="meta"), peer, 0, False), ["CPU"]),
        (lambda: window.put(mine[1:4], rank, 0, False), ["overlap"]),
        (lambda: window.put(window.map_remote_tensor(peer)[:3], peer, 1, False), ["overlap"]),
        (lambda: window.signal(2, False), ["rank 2"]),
        (lambda: window.wait_signal(-3, False), ["rank -3"]),
        (lambda: window.wait_signal(7, True), ["rank 7"]),
        (lambda: window.map_remote_tensor(9), ["rank 9"]),
        (lambda: window.get_attr(9), ["rank 9"]),
        (lambda: window.tensor_register(mine), ["already"]),
    ]
    cases = Cases()
    for call, words in refused:
        with cases(words[0]):
            expect_error(call, "ValueError", *words, within_s=5)
    cases.check()
    dist.barrier()
    assert not mine.any()
    window.put(mine[5:8], rank, 0, False)  # does not overlap
    window.wait_signal(rank, False)


def test_bad_arguments_are_errors_at_once() -> None:
    run_ranks(_bad_arguments, 2)


def _register_later(rank: int, n: int) -> None:
    first, second = _new_window(), _new_window()
    expect_error(lambda: first.signal(0, False), "ValueError", "tensor_register")
    expect_error(first.tensor_deregister, "ValueError")
    tensor = horon.zeros(5)
    for _ in range(3):
        first.tensor_register(tensor)
        first.put(torch.full((5,), rank + 1.0), (rank + 1) % n, 0, False)
        first.wait_signal((rank - 1) % n, False)
        assert (tensor == (rank - 1) % n + 1).all()
        first.tensor_deregister()
        expect_error(lambda: first.put(tensor, 0, 0, False), "tensor_register")
    expect_error(lambda: (first if rank else second).tensor_register(tensor), "the window differs")
    second.tensor_register(tensor, owning=False)
    second.signal(rank, False)
    second.wait_signal(rank, False)
    dist.barrier()


def test_register_and_deregister() -> None:
    run_ranks(_register_later, 2)


def _two_windows_two_groups(rank: int, n: int) -> None:
    group = dist.new_group()
    windows = [_window(10), _window(10), _window(10, group=group)]
    right, left = (rank + 1) % n, (rank - 1) % n
    for i, (window, _) in enumerate(windows):
        window.put(torch.full((10,), float(i)), right, 0, False)
    for i, (window, tensor) in reversed(list(enumerate(windows))):
        window.wait_signal(left, False)
        assert (tensor == i).all()
    # In one tensor, at the same time, with collectives on it between.
    shared = horon.zeros(20)
    both = [_new_window(shared), _new_window(shared[10:])]
    both[1].put(torch.ones(10), right, 0, False)
    both[1].wait_signal(left, False)
    dist.all_reduce(shared)
    assert shared.tolist() == [0.0] * 10 + [float(n)] * 10


def test_windows_do_not_touch_each_other() -> None:
    run_ranks(_two_windows_two_groups, 3)


def _mapped(rank: int, n: int) -> None:
    peer = 1 - rank
    window, mine = _window(2, 50_000)
    mine.fill_(rank + 1.0)
    dist.barrier()
    theirs, own = window.map_remote_tensor(peer), window.map_remote_tensor(rank)
    assert theirs.shape == (2, 50_000) and (theirs == peer + 1).all()
    assert own.data_ptr() == mine.data_ptr() and horon.is_in_arena(own)
    assert theirs.data_ptr() == window.map_remote_tensor(peer).data_ptr()
    dist.barrier()
    theirs[1, 7] = 42.0 + rank
    window.signal(peer, False)
    window.wait_signal(peer, False)
    assert mine[1, 7] == 42.0 + peer
    dist.barrier()
    # Without window, tensor and group.
    del window, mine, own
    gc.collect()
    used = horon.arena_statistics()["used_bytes"]
    assert used >= 400_000, "the memory that the peer has mapped is gone"
    others = [horon.zeros(2, 50_000) for _ in range(5)]
    assert (theirs[0] == peer + 1).all()
    dist.barrier()
    dist.destroy_process_group()
    assert (theirs[0] == peer + 1).all()
    del others, theirs
    gc.collect()


def test_a_mapped_tensor_outlives_window_and_group() -> None:
    assert_clean_exits(run_fresh_processes(_mapped, 2))


def _memory_comes_back(rank: int, n: int) -> None:
    dist.barrier()
    before = horon.arena_statistics()["used_bytes"]
    for _ in range(30):
        window, mine = _window(1 << 20)
        window.put(torch.ones(10), (rank + 1) % n, 0, False)
        window.wait_signal((rank - 1) % n, False)
        del window, mine
    dist.barrier()
    horon.empty(1)  # looks for what has come back
    assert horon.arena_statistics()["used_bytes"] <= before + 4096
    # A tensor that moves away leaves its memory to the window.
    before = horon.arena_statistics()["used_bytes"]
    window, mine = _window(1 << 20)
    mine.untyped_storage().resize_(0)
    assert horon.arena_statistics()["used_bytes"] >= before + (4 << 20)
    window.put(torch.ones(10), (rank + 1) % n, 0, False)
    window.wait_signal((rank - 1) % n, False)
    assert window.map_remote_tensor(rank)[:11].tolist() == [1.0] * 10 + [0.0]
    dist.barrier()


def test_memory_comes_back() -> None:
    run_ranks(_memory_comes_back, 3)


def _wait_for_the_gone(rank: int, n: int, how: str) -> None:
    window, _ = _window(10)
    work = window.wait_signal(n - 1, True)
    dist.barrier()
    if rank == n - 1:
        store().wait([f"in{r}" for r in range(rank)])
        time.sleep(0.2)
        if how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "abort":
            dist.distributed_c10d._abort_process_group()
            return
        dist.destroy_process_group()
        return
    store().set(f"in{rank}", "1")
    expect_error(lambda: window.wait_signal(n - 1, False), f"rank {n - 1}", within_s=DEATH_S)
    expect_error(work.wait, f"rank {n - 1}", within_s=DEATH_S)
    if how != "death":
        expect_error(lambda: window.put(torch.ones(1), n - 1, 0, False), f"rank {n - 1}", within_s=DEATH_S)
    if how != "abort":  # windows between the others go on
        window.put(torch.ones(1), 1 - rank, 0, False)
        window.wait_signal(1 - rank, False)
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["death", "departure", "abort"])
def test_the_end_of_a_peer_ends_the_wait(how: str) -> None:
    codes = [0, 0, -signal.SIGKILL if how == "death" else 0]
    assert_clean_exits(run_fresh_processes(_wait_for_the_gone, 3, how, timeout=40), codes)


def _timeouts(rank: int, n: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=4))
    dist.barrier(group)
    window, _ = _window(1, group=group)
    start_s = time.monotonic()
    expect_error(lambda: window.wait_signal(1 - rank, False), "Timed out waiting 4000ms", f"rank {1 - rank}")
    assert 3.9 < time.monotonic() - start_s < 12
    dist.barrier()
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    dist.all_reduce(torch.ones(1), group=group)  # the group goes on


def test_timeout_is_the_groups_and_names_the_rank() -> None:
    run_ranks(_timeouts, 2)


def _interrupted(rank: int, n: int) -> None:
    window, _ = _window(1)
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            window.wait_signal(1, False)
        except KeyboardInterrupt:
            print("interrupted")
    dist.barrier()
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    dist.destroy_process_group()


def test_ctrl_c() -> None:
    outcomes = run_fresh_processes(_interrupted, 2, timeout=30)
    assert_clean_exits(outcomes)
    assert "interrupted" in outcomes[0].stdout


def _other_threads_run(rank: int, n: int) -> None:
    window, _ = _window(1)
    done: list[int] = []
    waiter = threading.Thread(target=lambda: done.append(window.wait_signal(0, False) is not None))
    waiter.start()
    counted = 0
    give_up = time.monotonic() + 0.3
    while time.monotonic() < give_up:
        counted += 1
    assert counted > 100 and not done, "a wait holds the GIL"
    window.signal(0, False)
    waiter.join(10)
    assert done


def test_a_wait_leaves_the_interpreter_to_others() -> None:
    run_ranks(_other_threads_run, 1)


def _after_the_group(rank: int, n: int) -> None:
    window, mine = _window(10)
    work = window.wait_signal(1 - rank, True)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    for call in (
        lambda: window.put(torch.ones(1), rank, 0, False),
        lambda: window.signal(rank, False),
        lambda: window.wait_signal(rank, False),
        lambda: window.map_remote_tensor(rank),
        window.tensor_deregister,
        work.wait,
    ):
        expect_error(call, "DistBackendError", "destroy", within_s=5)
    mine.fill_(1.0)


def test_windows_of_a_destroyed_group_say_so() -> None:
    assert_clean_exits(run_fresh_processes(_after_the_group, 2, timeout=30))


def _exits(rank: int, n: int, how: str) -> None:
    window, mine = _window(1000)
    window.put(torch.ones(1000), 1 - rank, 0, False)
    window.wait_signal(1 - rank, False)
    kept: dict[str, Any] = {"window": window, "mapped": window.map_remote_tensor(1 - rank)}
    globals()["kept"] = kept
    if how == "pending":
        kept["work"] = window.wait_signal(1 - rank, True)
    elif how == "thread" and rank == 0:

        def wait() -> None:
            with contextlib.suppress(dist.DistBackendError):  # rank 1 may be gone before this process is
                window.wait_signal(1, False)

        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.2)
    elif how == "window first":
        kept.pop("window")
        del window
    elif how == "tensor first":
        del mine
    dist.barrier()
    if how == "sys.exit":
        sys.exit(0)


@pytest.mark.parametrize("how", ["as it is", "pending", "thread", "window first", "tensor first", "sys.exit"])
def test_exit_without_destroy(how: str) -> None:
    outcomes = run_fresh_processes(_exits, 2, how, timeout=30)
    assert_clean_exits(outcomes)
    for outcome in outcomes:
        assert "Error" not in outcome.stderr, outcome.stderr


def _forked(rank: int, n: int) -> None:
    window, mine = _window(10)
    mapped = window.map_remote_tensor(1 - rank)
    dist.barrier()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            expect_error(lambda: window.signal(1 - rank, False), "fork")
            expect_error(lambda: window.wait_signal(1 - rank, False), "fork")
            expect_error(lambda: _new_window(mine), "fork")
            del window, mapped, mine
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    mapped.fill_(rank + 5.0)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    assert (mine == 6 - rank).all()
    dist.destroy_process_group()


def test_a_forked_child_disturbs_nobody() -> None:
    assert_clean_exits(run_fresh_processes(_forked, 2, timeout=30))


def _no_window(rank: int, n: int) -> None:
    assert not _supports_window()
    expect_error(lambda: _new_window(torch.zeros(3)), "arena" if os.environ.get("HORON_ARENA_BYTES") else "host")
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_without_an_arena() -> None:
    assert_clean_exits(run_fresh_processes(_no_window, 2, env={"HORON_ARENA_BYTES": "0"}))


def _other_host(rank: int, n: int) -> None:
    os.environ["HORON_HOST_ID"] = f"host{rank}"
    dist.init_process_group("horon", store=dist.FileStore(os.environ["WINDOW_STORE"], n), rank=rank, world_size=n)
    _no_window(rank, n)


def test_between_hosts(tmp_path: Any) -> None:
    env = {"WINDOW_STORE": str(tmp_path / "store")}
    assert_clean_exits(run_fresh_processes(_other_host, 2, init=False, env=env, timeout=60))
