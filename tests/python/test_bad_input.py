"""Input that cannot work fails at once and leaves the group usable; what is odd but legal works."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, gloo_lacks, on_gloo, run_fresh_processes, run_ranks, store

AT_ONCE_S = 3.0


def _still_works(rank: int, world_size: int) -> None:
    for count in (3, 70001):
        tensor = torch.full((count,), float(rank))
        dist.all_reduce(tensor)
        assert (tensor == sum(range(world_size))).all()


def _torch_swallows_meta(name: str) -> bool:
    """Whether torch has a kernel of its own for meta tensors, which does nothing: no backend is ever asked."""
    operators = {
        "all_reduce": "allreduce_",
        "broadcast": "broadcast_",
        "all_gather": "allgather_",
        "all_gather_into_tensor": "_allgather_base_",
        "reduce_scatter": "reduce_scatter_",
        "send": "send",
        "recv": "recv_",
    }
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operators[name]}", "Meta"))


def _bad_tensor(rank: int, world_size: int, what: str) -> None:
    tensor = torch.eye(3).to_sparse() if what == "sparse" else torch.ones(3, device="meta")
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather": lambda: dist.all_gather([tensor] * world_size, torch.ones(3)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(6), tensor),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(3), [tensor] * world_size),
        "send": lambda: dist.send(tensor, 1 - rank),
        "recv": lambda: dist.recv(tensor, 1 - rank),
    }
    for name, call in calls.items():
        if what == "meta" and _torch_swallows_meta(name):
            continue
        try:
            expect_error(call, within_s=AT_ONCE_S)
        except AssertionError as error:
            raise AssertionError(f"{name} of a {what} tensor: {error}") from None
        _still_works(rank, world_size)


def _shrunk(rank: int, world_size: int, left_bytes: int) -> None:
    """Tensors that have lost their memory, as FSDP's parameters between uses."""
    peer, good = 1 - rank, torch.ones(400_000)
    for tensor in (torch.ones(400_000), torch.ones(400, 1000).t()):
        tensor.untyped_storage().resize_(left_bytes)
        calls = {
            "all_reduce": lambda tensor=tensor: dist.all_reduce(tensor),
            "all_reduce, async": lambda tensor=tensor: dist.all_reduce(tensor, async_op=True),
            "torch.ops.horon.all_reduce_": lambda tensor=tensor: torch.ops.horon.all_reduce_(
                tensor, "sum", dist.group.WORLD.group_name
            ),
            "broadcast": lambda tensor=tensor: dist.broadcast(tensor, 0),
            "all_gather": lambda tensor=tensor: dist.all_gather([good.clone() for _ in range(2)], tensor),
            "all_gather, outputs": lambda tensor=tensor: dist.all_gather([tensor, good], good),
            "reduce_scatter": lambda tensor=tensor: dist.reduce_scatter(good, [tensor, good]),
            "send": lambda tensor=tensor: dist.send(tensor, peer),
            "recv": lambda tensor=tensor: dist.recv(tensor, peer),
        }
        for name, call in calls.items():
            try:
                expect_error(call, "storage", within_s=AT_ONCE_S)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            _still_works(rank, world_size)


@pytest.mark.parametrize("left_bytes", [0, 1000])
def test_tensors_without_their_memory(left_bytes: int) -> None:
    gloo_lacks("crashes")
    run_ranks(_shrunk, 2, left_bytes)


def _empty_lists(rank: int, world_size: int) -> None:
    # Not through c10d's dispatcher, which finds no backend without a tensor.
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    calls = {
        "allreduce_coalesced": lambda: group.allreduce_coalesced([]),
        "allgather_coalesced": lambda: group.allgather_coalesced([[] for _ in range(world_size)], []),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="at least one tensor"):
            call()
        _still_works(rank, world_size)


def test_coalesced_calls_of_nothing() -> None:
    gloo_lacks("accepts some")
    run_ranks(_empty_lists, 2)


@pytest.mark.parametrize("what", ["sparse", "meta"])
def test_tensors_that_cannot_be_sent(what: str) -> None:
    gloo_lacks("accepts some, hangs on others")
    run_ranks(_bad_tensor, 2, what)


def _overlapping(rank: int, world_size: int, what: str) -> None:
    def make() -> torch.Tensor:
        return torch.ones(1).expand(1000) if what == "expanded" else torch.ones(10).as_strided((5, 4), (1, 1))

    expect_error(lambda: dist.all_reduce(make()), "all_reduce:", within_s=AT_ONCE_S)
    _still_works(rank, world_size)
    expect_error(lambda: dist.reduce(make(), rank), "reduce:", within_s=AT_ONCE_S)
    _still_works(rank, world_size)
    expect_error(lambda: dist.recv(make(), 1 - rank), "recv:", within_s=AT_ONCE_S)
    _still_works(rank, world_size)


@pytest.mark.parametrize("what", ["expanded", "windows"])
def test_overlapping_tensors_cannot_be_written(what: str) -> None:
    gloo_lacks("writes them")
    run_ranks(_overlapping, 2, what)


def _bad_ranks(rank: int, world_size: int) -> None:
    tensor = torch.ones(3)
    for bad in (-1, 2, 100):
        expect_error(lambda: dist.broadcast(tensor, bad), within_s=AT_ONCE_S)  # noqa: B023
        expect_error(lambda: dist.reduce(tensor, bad), within_s=AT_ONCE_S)  # noqa: B023
        expect_error(lambda: dist.send(tensor, bad), within_s=AT_ONCE_S)  # noqa: B023
        expect_error(lambda: dist.recv(tensor, bad), within_s=AT_ONCE_S)  # noqa: B023
    expect_error(lambda: dist.send(tensor, rank), within_s=AT_ONCE_S)
    for bad in (-1, -5):
        expect_error(lambda: dist.send(tensor, 1 - rank, tag=bad), "tag", within_s=AT_ONCE_S)  # noqa: B023
        expect_error(lambda: dist.recv(tensor, 1 - rank, tag=bad), "tag", within_s=AT_ONCE_S)  # noqa: B023
    expect_error(lambda: dist.new_group([0, 5]), within_s=AT_ONCE_S)
    _still_works(rank, world_size)


def test_unknown_ranks_and_negative_tags() -> None:
    gloo_lacks("broadcast from an unknown rank waits")
    run_ranks(_bad_ranks, 2)


def _wrong_shapes(rank: int, world_size: int) -> None:
    one = torch.ones(3)
    for call in (
        lambda: dist.all_gather([torch.ones(3)], one),
        lambda: dist.all_gather([torch.ones(3), torch.ones(3, dtype=torch.int32)], one),
        lambda: dist.all_gather_into_tensor(torch.ones(7), one),
        lambda: dist.all_gather_into_tensor(torch.ones(6, dtype=torch.float64), one),
        lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3)]),
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(7)),
        lambda: dist.all_to_all([torch.ones(3)], [torch.ones(3)]),
    ):
        expect_error(call, within_s=AT_ONCE_S)
        _still_works(rank, world_size)


def test_shapes_that_do_not_fit() -> None:
    run_ranks(_wrong_shapes, 2)


def _after_destroy(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()
    expect_error(lambda: dist.all_reduce(torch.ones(3)), within_s=AT_ONCE_S)
    if not on_gloo():  # The object itself outlives its group.
        expect_error(lambda: _wait(backend.allreduce([torch.ones(3)])), within_s=AT_ONCE_S)
        expect_error(lambda: _wait(backend.barrier()), within_s=AT_ONCE_S)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def test_use_after_destroy() -> None:
    run_ranks(_after_destroy, 2)


def _forked_child(rank: int, world_size: int) -> None:
    _still_works(rank, world_size)
    pending = dist.all_reduce(torch.ones(70001), async_op=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in (
                lambda: dist.all_reduce(torch.ones(3)),
                dist.barrier,
                lambda: dist.send(torch.ones(1), 1 - rank),
            ):
                message = expect_error(call, within_s=AT_ONCE_S)
                assert "fork" in message.lower(), message
            code = 0
        finally:
            os._exit(code)  # Without the destructors; the next test has those.
    deadline = time.monotonic() + 20
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the forked child hung")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0, "the forked child failed"
    pending.wait()
    _still_works(rank, world_size)
    dist.destroy_process_group()


def test_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    gloo_lacks("a forked child hangs")
    assert_clean_exits(run_fresh_processes(_forked_child, 2))


def _forked_child_exits(rank: int, world_size: int) -> None:
    import sys

    _still_works(rank, world_size)
    dist.new_group()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # Finalizes the interpreter: destructors and atexit handlers run in the child.
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the forked child ended with {os.waitstatus_to_exitcode(status)}"
    _still_works(rank, world_size)
    dist.destroy_process_group()


def test_forked_child_exits_normally() -> None:
    gloo_lacks("destructors may join threads that the child does not have")
    assert_clean_exits(run_fresh_processes(_forked_child_exits, 2))


def _forks_beside_an_operation(rank: int, world_size: int) -> None:
    from horon import _C

    _still_works(rank, world_size)
    if rank == 1:
        store().wait(["forked"])
    tensor = torch.full((70001,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        work.get_future()  # the group's thread runs it, and waits for rank 1
        time.sleep(0.2)
        pid = os.fork()
        if pid == 0:
            begin_s = time.monotonic()
            _C.shutdown_all(timedelta(seconds=2))  # what exit calls: there is no such thread here to wait for
            os._exit(int(time.monotonic() - begin_s > 1))
        _, status = os.waitpid(pid, 0)
        store().set("forked", "")
        assert os.waitstatus_to_exitcode(status) == 0, "the child waited for a thread of its parent"
    work.wait()
    assert (tensor == sum(range(world_size))).all()
    dist.destroy_process_group()


def test_a_child_that_was_forked_beside_an_operation_exits_at_once() -> None:
    gloo_lacks("nothing of this is promised")
    assert_clean_exits(run_fresh_processes(_forks_beside_an_operation, 2))


def _huge(rank: int, world_size: int) -> None:
    count = 2**31 + 8
    tensor = torch.zeros(count, dtype=torch.int8)
    tensor[-1] = rank + 1
    tensor[rank] = 5
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor[-1] == world_size and tensor[0] == 5 and tensor[1] == 5
    assert int(tensor.count_nonzero()) == 3
    tensor.fill_(rank)
    tensor[-1] = 9 if rank == 1 else 3
    dist.broadcast(tensor, 1)
    assert tensor[0] == 1 and tensor[-1] == 9 and int(tensor[:-1].min()) == 1 and int(tensor[:-1].max()) == 1


@pytest.mark.slow
def test_more_than_two_gibibytes() -> None:
    run_ranks(_huge, 2, timeout=300, group_timeout_s=280)
