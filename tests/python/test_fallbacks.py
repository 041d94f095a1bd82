"""Systems that forbid memfd_create, pidfd_open or Unix sockets: horon does without, says so once, and leaves nothing.

A seccomp filter makes the calls fail, in fresh processes, before horon is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import shm_entries
from forbidden_calls import forbid
from harness import Outcome, assert_clean_exits, expect_error, on_gloo, run_fresh_processes
from zygote import init_group

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo: shares no memory")

DEATH_S = 10.0
LINES = {
    "memfd_create": "using unlinked files in /dev/shm instead",
    "pidfd_open": "watching peers through pipes instead",
}
"""What is logged, once per process, when a call is forbidden."""

BOTH = ["memfd_create", "pidfd_open"]
# On torch 2.15, PyTorch's flight recorder writes its dump before an error that ends a group is raised, and looks up C++
# stack traces for it: seconds of CPU time per rank, which are not ours to measure.
NO_STACKS = {"TORCH_INCLUDE_STACK_TRACE": "0"}


def _try_filter(rank: int, world_size: int) -> str:
    try:
        forbid(["memfd_create"])
        os.memfd_create("x")
    except PermissionError:
        return ""
    except (OSError, NotImplementedError) as error:
        return str(error)
    return "the filter had no effect"


@functools.cache
def _why_no_filters() -> str:
    return run_fresh_processes(_try_filter, 1, init=False)[0].result or ""


@pytest.fixture(autouse=True)
def nothing_in_shm(shm_before: set[str]) -> Iterator[None]:
    """Filters must work here; and nothing of ours may stay in /dev/shm."""
    if _why_no_filters():
        pytest.skip(f"no seccomp filters: {_why_no_filters()}")
    yield
    assert not _new_files(shm_before)


def _new_files(before: set[str]) -> set[str]:
    return {name for name in shm_entries() - before if name.startswith("horon")}


def _join(rank: int, world_size: int, path: str, timeout_s: float = 40) -> None:
    init_group(
        {"backend": "horon", "store": path, "rank": rank, "world_size": world_size, "group_timeout_s": timeout_s}
    )


def _is_shared(group: dist.ProcessGroup | None = None) -> bool:
    group = group or dist.group.WORLD
    assert group is not None
    return bool(group._get_backend(torch.device("cpu")).is_shared)


def _check_operations(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    for count in (1, 1000, 300_007):
        tensor = torch.full((count,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(range(world_size))).all()
        got = torch.empty(count)
        operations = [
            dist.P2POp(dist.isend, torch.full((count,), float(rank)), (rank + 1) % world_size, group),
            dist.P2POp(dist.irecv, got, (rank - 1) % world_size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (got == (rank - 1) % world_size).all()


def _works(rank: int, world_size: int, path: str, calls: list[str], error: int, forbidding: list[int]) -> None:
    if rank in forbidding:
        forbid(calls, error)
    shm = shm_entries()
    _join(rank, world_size, path)
    assert _is_shared()
    assert not _new_files(shm)
    _check_operations(rank, world_size)
    _check_operations(rank, world_size, dist.new_group())
    dist.destroy_process_group()
    _join(rank, world_size, path + ".again")
    assert _is_shared()
    _check_operations(rank, world_size)
    dist.destroy_process_group()


def _assert_logged_once(outcomes: list[Outcome], calls: list[str], forbidding: list[int]) -> None:
    for outcome in outcomes:
        for call, line in LINES.items():
            # Rank 0 alone makes memory.
            expected = outcome.rank in forbidding and call in calls and (call != "memfd_create" or outcome.rank == 0)
            assert outcome.stderr.count(line) == expected, (outcome.rank, call, outcome.stderr)


@pytest.mark.parametrize(
    ("calls", "error", "forbidding"),
    [
        (["memfd_create"], errno.EPERM, [0, 1]),
        (["pidfd_open"], errno.ENOSYS, [0, 1]),
        (BOTH, errno.ENOSYS, [0, 1, 2]),
        (BOTH, errno.EPERM, [0]),
        (BOTH, errno.EPERM, [1]),
    ],
)
def test_groups_work_without(calls: list[str], error: int, forbidding: list[int], tmp_path: os.PathLike[str]) -> None:
    world_size = max(len(forbidding), 2)
    outcomes = run_fresh_processes(
        _works, world_size, os.path.join(tmp_path, "store"), calls, error, forbidding, init=False
    )
    assert_clean_exits(outcomes)
    _assert_logged_once(outcomes, calls, forbidding)


def _leaves_a_child() -> int:
    """A child like those of a data loader: it does nothing, and has a copy of every descriptor."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def _killed_peer(rank: int, world_size: int, path: str, calls: list[str], error: int, how: str) -> None:
    forbid(calls, error)
    _join(rank, world_size, path)
    _check_operations(rank, world_size)
    if rank == world_size - 1:
        if how == "with a child":
            _leaves_a_child()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "receive":
        message = expect_error(lambda: dist.recv(torch.ones(3), world_size - 1), within_s=DEATH_S)
    else:
        message = expect_error(lambda: dist.all_reduce(torch.ones(1 << 20)), within_s=DEATH_S)
    assert f"rank {world_size - 1}" in message.lower(), message
    dist.destroy_process_group()


@pytest.mark.parametrize(("calls", "error"), [(["pidfd_open"], errno.EPERM), (BOTH, errno.ENOSYS)])
@pytest.mark.parametrize("how", ["reduction", "receive", "with a child"])
def test_killed_peer_is_an_error(calls: list[str], error: int, how: str, tmp_path: os.PathLike[str]) -> None:
    outcomes = run_fresh_processes(
        _killed_peer, 3, os.path.join(tmp_path, "store"), calls, error, how, init=False, timeout=40, env=NO_STACKS
    )
    assert outcomes[2].left_processes == (how == "with a child")
    outcomes[2].left_processes = False
    assert_clean_exits(outcomes, [0, 0, -signal.SIGKILL])


def _group_in_a_child(rank: int, world_size: int, path: str, calls: list[str], error: int) -> None:
    forbid(calls, error)
    _join(rank, world_size, path)
    _check_operations(rank, world_size)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dist.destroy_process_group()
            _join(rank, world_size, path + ".child")
            assert _is_shared()
            _check_operations(rank, world_size)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            expect_error(lambda: dist.all_reduce(torch.ones(3)), "rank 1", within_s=DEATH_S)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if rank == 0 else -signal.SIGKILL)
    _check_operations(rank, world_size)
    dist.destroy_process_group()


def test_a_forked_child_can_make_a_group_of_its_own(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "store")
    assert_clean_exits(
        run_fresh_processes(_group_in_a_child, 2, path, BOTH, errno.EPERM, init=False, timeout=40, env=NO_STACKS)
    )


def _nothing_shared(rank: int, world_size: int, path: str, call: str, forbidding: list[int], ends: str) -> None:
    if rank in forbidding:
        forbid([call])
    start_s = time.monotonic()
    _join(rank, world_size, path)
    took_s = time.monotonic() - start_s
    assert took_s < DEATH_S, f"making the group took {took_s:.1f} s"
    assert not _is_shared()
    _check_operations(rank, world_size)
    if ends == "killed":
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        expect_error(lambda: dist.all_reduce(torch.ones(3)), within_s=DEATH_S)
    dist.destroy_process_group()


@pytest.mark.parametrize("ends", ["destroyed", "killed"])
@pytest.mark.parametrize("forbidding", [[0], [1], [0, 1, 2]], ids=str)
def test_without_unix_sockets_gloo_carries_the_group(
    forbidding: list[int], ends: str, tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "store")
    outcomes = run_fresh_processes(_nothing_shared, 3, path, "socket", forbidding, ends, init=False, env=NO_STACKS)
    assert_clean_exits(outcomes, [0, 0, 0 if ends == "destroyed" else -signal.SIGKILL])
    for rank in forbidding:
        assert outcomes[rank].stderr.count(f"rank {rank} shares no memory") == 1, outcomes[rank].stderr


def test_without_any_memory_to_share_gloo_carries_the_group(tmp_path: os.PathLike[str]) -> None:
    outcomes = run_fresh_processes(
        _nothing_shared, 3, os.path.join(tmp_path, "store"), "ftruncate", [0], "destroyed", init=False
    )
    assert_clean_exits(outcomes)
    assert "ftruncate" in outcomes[0].stderr


CLONE_NEWUSER = 0x10000000


def _another_user(rank: int, world_size: int, path: str, other: int) -> None:
    if rank == other:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUSER) != 0:  # which makes this process nobody's
            raise OSError(ctypes.get_errno(), "unshare refuses a user namespace")
    for name in ("", ".again"):
        _join(rank, world_size, path + name)
        assert not _is_shared()
        _check_operations(rank, world_size)
        dist.destroy_process_group()


def _try_user_namespace(rank: int, world_size: int) -> bool:
    return ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0


@pytest.mark.parametrize("other", [0, 2])
def test_ranks_of_two_users_use_gloo_and_are_told(other: int, tmp_path: os.PathLike[str]) -> None:
    if not run_fresh_processes(_try_user_namespace, 1, init=False)[0].result:
        pytest.skip("no user namespaces")
    path = os.path.join(tmp_path, "store")
    open(path, "w").close()
    os.chmod(path, 0o666)
    outcomes = run_fresh_processes(_another_user, 3, path, other, init=False)
    assert_clean_exits(outcomes)
    told = [outcome.stderr.count("only processes of one user share memory") for outcome in outcomes]
    assert told == [1, 0, 0], outcomes[0].stderr


def _few_descriptors(rank: int, world_size: int, path: str, more: int) -> None:
    store = dist.FileStore(path, world_size)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(RuntimeError):
        dist.init_process_group("horon", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=40))


@pytest.mark.parametrize("more", [1, 2, 3])
def test_too_few_descriptors_are_named_as_the_reason(more: int, tmp_path: os.PathLike[str]) -> None:
    outcomes = run_fresh_processes(_few_descriptors, 2, os.path.join(tmp_path, "store"), more, init=False, timeout=30)
    for outcome in outcomes:
        assert not outcome.timed_out
        assert "/dev/shm" not in outcome.stderr, outcome.stderr
    assert "ulimit -n" in outcomes[0].stderr, outcomes[0].stderr


def _trains_without_an_arena(rank: int, world_size: int, path: str) -> None:
    import horon.torch as hvd

    forbid(["memfd_create"])
    _join(rank, world_size, path)
    hvd.init()
    model = torch.nn.Linear(5, 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.full((2, 5), float(rank))).sum().backward()
    optimizer.step()
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert (weights == weights[0]).all()
    hvd.shutdown()
    dist.destroy_process_group()


def test_horovods_optimizer_works_without_an_arena(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "store")
    assert_clean_exits(run_fresh_processes(_trains_without_an_arena, 2, path, init=False, timeout=60))
