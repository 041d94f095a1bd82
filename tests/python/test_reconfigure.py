"""Groups whose members change while they live: torch 2.15's `reconfigure`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import (
    STALL_S,
    assert_clean_exits,
    gloo_lacks,
    needs_torch_215,
    on_gloo,
    run_fresh_processes,
    run_ranks,
)

pytestmark = needs_torch_215

_BACKEND = "gloo" if on_gloo() else "horon"


class Members:
    """This process among those that may become members of the default group."""

    def __init__(self, number: int, total: int, path: str, is_empty: bool = True, timeout_s: float = 40) -> None:
        self.number = number
        self.total = total
        self.store = dist.PrefixStore("handles", dist.FileStore(path + "-handles", total))
        dist.init_process_group(
            _BACKEND,
            store=dist.FileStore(path, total),
            rank=number,
            world_size=total,
            timeout=timedelta(seconds=timeout_s),
            enable_reconfigure=is_empty,
        )
        self.backend = dist.get_backend_impl(device=torch.device("cpu"))

    def handles(self, name: str, of: list[int] | None = None) -> list[str]:
        """The present handle of each of these; all of them have to call this, once with each name."""
        self.store.set(f"{name}/{self.number}", dist._get_reconfigure_handle())
        return [self.store.get(f"{name}/{number}").decode() for number in of or range(self.total)]

    def wait_for_all(self, name: str) -> None:
        self.store.set(f"{name}/{self.number}", "")
        self.store.wait([f"{name}/{number}" for number in range(self.total)], timedelta(seconds=40))

    def change(self, uuid: int, of: list[int] | None = None) -> None:
        """These become the members, in this order."""
        dist._reconfigure(uuid, self.handles(f"change {uuid}", of), timeout=timedelta(seconds=40)).wait()
        self.check(of or list(range(self.total)))

    def check(self, of: list[int]) -> None:
        """That this is the rank of this process among these, and that they work together."""
        assert (dist.get_rank(), dist.get_world_size()) == (of.index(self.number), len(of))
        assert (self.backend.rank(), self.backend.size()) == (of.index(self.number), len(of))
        for elements in (1, 1000, 500_000):
            tensor = torch.full((elements,), self.number + 1.0)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, sum(number + 1 for number in of)))


def _raises(kind: type[Exception], pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=pattern):
        call()


def _path(tmp_path: object) -> str:
    return f"{tmp_path}/store"


def _begins_empty(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    assert dist._supports_reconfigure()
    if not on_gloo():
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.barrier(),
            lambda: dist.send(torch.ones(1), (rank + 1) % world_size),
        ):
            _raises(RuntimeError, r"no members yet.*_reconfigure\(uuid, handles\)", call)
        assert members.backend.transport == "none yet"
    members.change(1)
    if not on_gloo():
        assert members.backend.transport == "shared memory"
    dist.destroy_process_group()


def test_begins_without_members(tmp_path: object) -> None:
    run_ranks(_begins_empty, 3, _path(tmp_path), init=False)


def _changes(rank: int, world_size: int, path: str, is_empty: bool) -> None:
    members = Members(rank, world_size, path, is_empty)
    if is_empty:
        members.change(1)
    else:
        members.check(list(range(world_size)))
    for uuid, of in enumerate(([0, 1], [2, 0, 1], [1], [2, 1], [0, 1, 2], [1, 0]), start=10):
        if rank in of:
            members.change(uuid, of)
        members.wait_for_all(f"changed {uuid}")
    members.change(20)
    dist.destroy_process_group()


@pytest.mark.parametrize("is_empty", [True, False])
def test_members_leave_and_come_back(tmp_path: object, is_empty: bool) -> None:
    run_ranks(_changes, 3, _path(tmp_path), is_empty, init=False)


def _splits_and_merges(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(100 + rank, [rank])
    half = [0, 1] if rank < 2 else [2, 3]
    members.change(200 + half[0], half)
    members.change(300)
    dist.destroy_process_group()


def test_disjoint_groups_become_one(tmp_path: object) -> None:
    run_ranks(_splits_and_merges, 4, _path(tmp_path), init=False)


def _any_order(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    dist._reconfigure(1, set(members.handles("now"))).wait()
    # As they were numbered before.
    members.check(list(range(world_size)))
    dist.destroy_process_group()


def test_handles_in_a_set_keep_the_order_of_ranks(tmp_path: object) -> None:
    gloo_lacks("sorts handles as text")
    run_ranks(_any_order, 3, _path(tmp_path), init=False)


def _everything(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    if rank == 1:
        members.wait_for_all("done")
        dist.destroy_process_group()
        return
    of = [number for number in range(world_size) if number != 1]
    members.change(2, of)
    me, n = dist.get_rank(), dist.get_world_size()

    parts = [torch.zeros(3) for _ in range(n)]
    dist.all_gather(parts, torch.full((3,), float(me)))
    assert [int(part[0]) for part in parts] == list(range(n))
    whole = torch.zeros(n * 2)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(me)))
    assert whole.tolist() == [float(r) for r in range(n) for _ in range(2)]
    own = torch.zeros(2)
    dist.reduce_scatter_tensor(own, torch.arange(2.0 * n))
    assert own.tolist() == [n * 2.0 * me, n * (2.0 * me + 1)]
    out = torch.zeros(n)
    dist.all_to_all_single(out, torch.full((n,), float(me)))
    assert out.tolist() == [float(r) for r in range(n)]
    value = torch.full((4,), float(me))
    dist.broadcast(value, group_src=n - 1)
    assert value[0] == n - 1
    dist.reduce(value, group_dst=0)
    got = [torch.zeros(1) for _ in range(n)] if me == 0 else None
    dist.gather(torch.full((1,), float(me)), got, group_dst=0)
    mine = torch.zeros(1)
    dist.scatter(mine, [torch.full((1,), float(r)) for r in range(n)] if me == 0 else None, group_src=0)
    assert mine[0] == me
    objects: list[object] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(n)]
    work = dist.all_reduce(torch.ones(10), async_op=True)
    works = [dist.isend(torch.full((5,), float(me)), group_dst=(me + 1) % n)]
    message = torch.zeros(5)
    dist.recv(message, group_src=(me - 1) % n)
    assert message[0] == (me - 1) % n
    for each in (*works, work):
        each.wait()
    dist.monitored_barrier()
    tensors = [torch.ones(4), torch.ones(2)]
    if not on_gloo():
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert tensors[1].tolist() == [float(n)] * 2
        torch.ops.horon.all_reduce_(tensors[0], "sum", dist.group.WORLD.group_name)
        members.backend.all_reduce_(tensors[0], "max")
        assert tensors[0].tolist() == [float(n * n)] * 4
        assert members.backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    sub = dist.new_group(list(range(n)))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=sub)
    assert tensor[0] == n
    members.wait_for_all("done")
    dist.destroy_process_group()


def test_every_operation_with_the_new_members(tmp_path: object) -> None:
    run_ranks(_everything, 3, _path(tmp_path), init=False)


def _lost(rank: int, world_size: int, path: str, is_empty: bool) -> float:
    members = Members(rank, world_size, path, is_empty)
    if is_empty:
        members.change(1)
    handles = members.handles("now")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(1000)
    _raises(RuntimeError, "rank 1 .*died|[Cc]onnection|closed", lambda: dist.all_reduce(tensor))
    begin = time.monotonic()
    dist._reconfigure(2, [handles[0], handles[2]], timeout=timedelta(seconds=30)).wait()
    took = time.monotonic() - begin
    members.check([0, 2])
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize("is_empty", [True, False])
def test_survivors_of_a_killed_rank_go_on(tmp_path: object, is_empty: bool) -> None:
    outcomes = run_fresh_processes(_lost, 3, _path(tmp_path), is_empty, init=False)
    assert_clean_exits(outcomes, [0, -signal.SIGKILL, 0])


def _waits_elsewhere(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    handles = members.handles("now")
    if rank == 2:  # never comes to the operation that the others wait in, and is left out
        members.wait_for_all("done")
        dist.destroy_process_group()
        return
    errors: list[BaseException] = []

    def waits() -> None:
        try:
            dist.all_reduce(torch.ones(1_000_000))
        except RuntimeError as error:
            errors.append(error)

    waiting = [threading.Thread(target=waits), None]
    waiting[0].start()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    time.sleep(0.3)
    dist._reconfigure(2, handles[:2], timeout=timedelta(seconds=30)).wait()
    waiting[0].join(STALL_S)
    assert not waiting[0].is_alive() and len(errors) == 1
    _raises(RuntimeError, "shut down|destroyed|left|departed", work.wait)
    members.check([0, 1])
    members.wait_for_all("done")
    dist.destroy_process_group()


def test_what_waits_in_the_old_group_fails_in_it(tmp_path: object) -> None:
    gloo_lacks("goes on to wait")
    run_ranks(_waits_elsewhere, 3, _path(tmp_path), init=False)


def _dead_member(rank: int, world_size: int, path: str) -> float:
    members = Members(rank, world_size, path)
    members.change(1)
    handles = members.handles("now")
    dist.barrier()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    begin = time.monotonic()
    _raises(
        dist.DistBackendError,
        r"rank 1 \(pid \d+\) has ended before it came to reconfigure",
        lambda: dist._reconfigure(2, handles, timeout=timedelta(seconds=30)),
    )
    took = time.monotonic() - begin
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)  # as it was
    dist._reconfigure(3, [handles[0], handles[2]], timeout=timedelta(seconds=30))
    members.check([0, 2])
    dist.destroy_process_group()
    return took


def test_a_member_that_has_ended_is_named_at_once(tmp_path: object) -> None:
    gloo_lacks("waits for it")
    outcomes = run_fresh_processes(_dead_member, 3, _path(tmp_path), init=False)
    assert_clean_exits(outcomes)
    assert all(outcomes[rank].result < STALL_S for rank in (0, 2))


def _does_not_come(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    if rank == 0:
        _raises(
            dist.DistBackendError,
            "rank 1.*(has not|did not|not come)|[Tt]imed out",
            lambda: dist._reconfigure(2, members.handles("now"), timeout=timedelta(seconds=1)),
        )
    else:
        members.handles("now")
    members.wait_for_all("over")
    members.check([0, 1])  # with whom it was before
    members.change(3)
    dist.destroy_process_group()


def test_who_waits_in_vain_keeps_what_it_had(tmp_path: object) -> None:
    gloo_lacks("is left without connections")
    run_ranks(_does_not_come, 2, _path(tmp_path), init=False)


def _after_abort(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    members.backend.abort()
    if not on_gloo():
        _raises(RuntimeError, "aborted|shut down", lambda: dist.all_reduce(torch.ones(1)))
    members.change(2)
    dist.destroy_process_group()


def test_after_abort(tmp_path: object) -> None:
    run_ranks(_after_abort, 3, _path(tmp_path), init=False)


def _after_timeout(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    members.backend.set_timeout(timedelta(milliseconds=300))
    if rank == 1:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        _raises(RuntimeError, "[Tt]imed out", work.wait)
    members.wait_for_all("over")
    members.backend.set_timeout(timedelta(seconds=30))
    members.change(2)
    dist.destroy_process_group()


def test_after_a_timeout(tmp_path: object) -> None:
    run_ranks(_after_timeout, 3, _path(tmp_path), init=False)


def _timeout_stays(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path, timeout_s=1)
    dist._reconfigure(1, members.handles("now"), timeout=timedelta(seconds=30))
    if rank == 0:
        _raises(RuntimeError, "[Tt]imed out.*1000 ?ms|1000 ?ms", lambda: dist.all_reduce(torch.ones(1)))
    members.wait_for_all("over")
    dist.destroy_process_group()


def test_the_timeout_of_the_meeting_is_not_that_of_operations(tmp_path: object) -> None:
    gloo_lacks("words")
    run_ranks(_timeout_stays, 2, _path(tmp_path), init=False)


def _bad_input(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    own = dist._get_reconfigure_handle()
    soon = timedelta(seconds=20)

    def refused(words: str, uuid: int, handles: list[str], timeout: timedelta = soon) -> None:
        begin = time.monotonic()
        _raises(RuntimeError, words, lambda: dist._reconfigure(uuid, handles, timeout=timeout))
        assert time.monotonic() - begin < STALL_S

    refused("reconfigure: expected the handle of each member, got none", 2, [])
    refused("reconfigure: 'nonsense' is no handle of a horon group", 2, [own, "nonsense"])
    refused("reconfigure: '' is no handle", 2, [""])
    refused("is no handle", 2, [own + ":"])
    refused("is no handle", 2, [own.replace("horon", "gloo")])
    refused("is no handle", 2, [own.replace(":", ":x", 1)])
    refused(r"process \d+ comes twice, as rank 0 and as rank 1", 2, [own, own])
    handles = members.handles("now")
    refused("none of the 1 handles is this process's own", 2, [handles[1 - rank]])
    refused("uuid 1 was already used by this group", 1, handles)
    with pytest.raises(ValueError, match="timeout: expected more than 0 ms, got 0"):
        dist._reconfigure(2, handles, timeout=timedelta(0))
    members.wait_for_all("refused")
    # The ranks mean different members: both learn of it.
    refused(
        "(uuid 5 was already used, for other members or the same ones in another order"
        "|which is rank . here, was given other handles with uuid 5)",
        5,
        handles[:: 1 - 2 * rank],
    )
    members.wait_for_all("disagreed")
    members.check([0, 1])
    members.change(6)
    dist.destroy_process_group()


def test_bad_input_changes_nothing(tmp_path: object) -> None:
    gloo_lacks("words")
    run_ranks(_bad_input, 2, _path(tmp_path), init=False)


def _newcomer(rank: int, world_size: int, path: str) -> None:
    """Rank 1 is killed, and a new process takes its place."""
    if rank == 3:  # starts when the first one is gone
        dist.FileStore(path + "-handles", world_size).wait(["died"], timedelta(seconds=40))
    members = Members(1 if rank == 3 else rank, 3, path)
    members.store = dist.PrefixStore("new", members.store) if rank == 3 else members.store
    first = dist.PrefixStore("handles", dist.FileStore(path + "-handles", world_size))
    if rank != 3:
        members.change(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _raises(RuntimeError, "died", lambda: dist.all_reduce(torch.ones(100)))
        dist.FileStore(path + "-handles", world_size).set("died", "")
    first.set(f"again/{rank}", dist._get_reconfigure_handle())
    handles = [first.get(f"again/{number}").decode() for number in (0, 3, 2)]
    dist._reconfigure(2, handles, timeout=timedelta(seconds=40))
    members.check([0, 1, 2])
    dist.destroy_process_group()


def test_a_new_process_takes_the_place_of_a_killed_one(tmp_path: object) -> None:
    gloo_lacks("words")
    outcomes = run_fresh_processes(_newcomer, 4, _path(tmp_path), init=False)
    assert_clean_exits(outcomes, [0, -signal.SIGKILL, 0, 0])


def _many_times(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)

    def used() -> tuple[int, int, int]:
        with open("/proc/self/status") as status:
            threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), threads, sum(1 for line in maps if "horon" in line)

    for uuid in range(1, 6):
        members.change(uuid)
    before = used()
    for uuid in range(6, 56):
        members.change(uuid)
    after = used()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 1 and after[2] <= before[2] + 2, (before, after)
    dist.destroy_process_group()


def test_fifty_changes_leave_nothing_behind(tmp_path: object) -> None:
    gloo_lacks("keeps its contexts")
    run_ranks(_many_times, 2, _path(tmp_path), init=False)


def _in_child(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    handle = dist._get_reconfigure_handle()
    pid = os.fork()
    if pid == 0:
        try:
            _raises(RuntimeError, "reconfigure: this process was forked", lambda: dist._reconfigure(2, [handle]))
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    members.check([0])
    dist.destroy_process_group()


def test_not_in_a_forked_child(tmp_path: object) -> None:
    gloo_lacks("words")
    assert_clean_exits(run_fresh_processes(_in_child, 1, _path(tmp_path), init=False))


def _interrupted(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    handles = members.handles("now")
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist._reconfigure(2, handles, timeout=timedelta(seconds=30))
    members.wait_for_all("over")
    members.check([0, 1])
    dist.destroy_process_group()


def test_ctrl_c_ends_the_meeting_and_not_the_group(tmp_path: object) -> None:
    gloo_lacks("can not be interrupted")
    assert_clean_exits(run_fresh_processes(_interrupted, 2, _path(tmp_path), init=False))


def _over_hosts(rank: int, world_size: int, path: str) -> None:
    os.environ["HORON_HOST_ID"] = f"host{rank // 2}"
    members = Members(rank, world_size, path)
    members.change(1)
    assert members.backend.transport == "hosts, tcp"
    members.wait_for_all("first")
    if rank < 2:
        members.change(2, [0, 1])
        assert members.backend.transport == "shared memory"
    members.wait_for_all("second")
    if rank != 3:
        members.change(3, [2, 0, 1])
    members.wait_for_all("third")
    dist.destroy_process_group()


def test_between_hosts(tmp_path: object) -> None:
    gloo_lacks("has no hosts")
    assert_clean_exits(run_fresh_processes(_over_hosts, 4, _path(tmp_path), init=False))


def _hooks_stay(rank: int, world_size: int, path: str) -> None:
    members = Members(rank, world_size, path)
    members.change(1)
    completed: list[int] = []
    aborted: list[bool] = []
    members.backend.register_abort_hook(7, lambda: aborted.append(True))
    members.change(2)
    del completed[:]
    members.backend.abort()
    assert aborted == [True]
    members.change(3)
    dist.destroy_process_group()


def test_hooks_stay(tmp_path: object) -> None:
    gloo_lacks("has no hooks")
    run_ranks(_hooks_stay, 2, _path(tmp_path), init=False)


def _trains(rank: int, world_size: int, path: str) -> float:
    """DDP goes on with those who are left."""
    members = Members(rank, world_size, path)
    members.change(1)
    handles = members.handles("now")
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    x, y = torch.randn(32, 16), torch.randn(32, 4)

    def train(steps: int) -> float:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            optimizer.step()
        return float(loss)

    first = train(5)
    dist.barrier()
    if rank == 2:
        os._exit(0)
    _raises(RuntimeError, "rank 2|ended|left", lambda: dist.barrier())
    dist._reconfigure(2, handles[:2])
    last = train(20)
    assert last < first
    sums = torch.stack([parameter.sum() for parameter in model.parameters()])
    same = sums.clone()
    dist.broadcast(same, group_src=0)
    assert torch.equal(sums, same)
    dist.destroy_process_group()
    return last


def test_ddp_goes_on_with_those_who_are_left(tmp_path: object) -> None:
    gloo_lacks("waits for who has left")
    outcomes = run_fresh_processes(_trains, 3, _path(tmp_path), init=False)
    assert_clean_exits(outcomes)
