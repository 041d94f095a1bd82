"""Ranks die, and the others go on: shrink_to_survivors, and torch.distributed.shrink_group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import STALL_S, assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks, store
from host_groups import join

if on_gloo():
    pytest.skip("gloo: can not shrink", allow_module_level=True)

import horon
from horon._survivors import decide

_KILLED = -signal.SIGKILL


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check(group: dist.ProcessGroup | None, numbers: list[int], number: int) -> None:
    """That the processes with these numbers are the group, in this order."""
    assert (dist.get_rank(group), dist.get_world_size(group)) == (numbers.index(number), len(numbers))
    for elements in (1, 3000, 400_000):
        tensor = torch.full((elements,), number + 1.0)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full_like(tensor, sum(other + 1 for other in numbers)))
    objects: list[int | None] = [None] * len(numbers)
    dist.all_gather_object(objects, number, group=group)
    assert objects == numbers
    me, n = dist.get_rank(group), len(numbers)
    if n == 1:
        return
    message = torch.zeros(2)
    work = dist.isend(torch.full((2,), float(number)), group=group, group_dst=(me + 1) % n)
    dist.recv(message, group=group, group_src=(me - 1) % n)
    work.wait()
    assert message[0] == numbers[me - 1]


def test_who_is_left_is_known() -> None:
    three = range(3)
    assert decide([0, 1, 2], [], three, is_late=False) == [0, 1, 2]
    assert decide([0, 2], [], three, is_late=False) is None
    assert decide([2, 0], [1], three, is_late=False) == [0, 2]
    assert decide([2, 0], [], three, is_late=True) == [0, 2]
    assert decide([2, 0, 1], [1], three, is_late=False) == [0, 2]  # it came, and ended then
    assert decide([0], [1], three, is_late=False) is None
    assert decide([0], [0, 1, 2], three, is_late=False) == []
    assert decide([7, 4], [5], [7, 5, 4], is_late=False) == [7, 4]  # in their order


def _lost(rank: int, world_size: int, dead: list[int]) -> float:
    dist.barrier()
    if rank in dead:
        _die()
    expect_error(lambda: dist.all_reduce(torch.ones(5)), "died")
    begin = time.monotonic()
    group = horon.shrink_to_survivors()
    took = time.monotonic() - begin
    assert group is dist.group.WORLD
    left = [number for number in range(world_size) if number not in dead]
    _check(None, left, rank)
    part = dist.new_group([0])  # groups can be made of it
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=part)
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize(("world_size", "dead"), [(2, [1]), (3, [0]), (3, [1]), (4, [1, 2]), (4, [3, 0, 1])])
def test_killed_ranks(world_size: int, dead: list[int]) -> None:
    outcomes = run_fresh_processes(_lost, world_size, dead)
    assert_clean_exits(outcomes, [_KILLED if rank in dead else 0 for rank in range(world_size)])
    # At once, and not when some time is over.
    assert all(outcome.result < STALL_S for outcome in outcomes if outcome.rank not in dead)


def _one_after_the_other(rank: int, world_size: int, order: list[int]) -> None:
    numbers = list(range(world_size))
    for dead in order:
        groups = [dist.new_group(list(range(n))) for n in range(1, len(numbers) + 1)]  # names come again
        assert len(groups) == len(numbers)
        _check(groups[-1], numbers, rank)
        dist.barrier()
        if rank == dead:
            _die()
        expect_error(lambda: dist.barrier(), "died")
        horon.shrink_to_survivors()
        numbers.remove(dead)
        _check(None, numbers, rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("order", [[0, 3], [1, 0, 2], [3, 1]])
def test_one_after_the_other(order: list[int]) -> None:
    outcomes = run_fresh_processes(_one_after_the_other, 4, order)
    assert_clean_exits(outcomes, [_KILLED if rank in order else 0 for rank in range(4)])


def _of_a_group(rank: int, world_size: int) -> None:
    signals = store()
    other = dist.new_group([0, 1])
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=other)
        signals.wait(["done"])
    else:
        dist.barrier(group)
        if rank == 2:
            _die()
        expect_error(lambda: dist.all_reduce(torch.ones(3), group=group), "died")
        shrunk = horon.shrink_to_survivors(group)
        assert dist.get_process_group_ranks(shrunk) == [1, 3]
        tensor = torch.full((7,), float(rank))
        dist.all_reduce(tensor, group=shrunk)
        assert tensor[0] == 4
        if rank == 1:
            dist.all_reduce(torch.ones(1), group=other)  # goes on as it was
            signals.set("done", "")
    os._exit(0)


def test_another_group_than_the_default_one() -> None:
    assert_clean_exits(run_fresh_processes(_of_a_group, 4), [0, 0, _KILLED, 0])


def _waits_for_another(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        _die()
    if rank == 0:
        time.sleep(0.5)  # it has heard of it in another way
    else:  # for one that is alive, and will not send
        words = "a rank has left it to go on with those that are left"
        expect_error(lambda: dist.recv(torch.ones(5), src=0 if rank == 2 else 2), words)
    horon.shrink_to_survivors()
    _check(None, [0, 2, 3], rank)
    dist.destroy_process_group()


def test_who_waits_for_one_that_is_left_gets_an_error() -> None:
    assert_clean_exits(run_fresh_processes(_waits_for_another, 4), [0, _KILLED, 0, 0])


def _dies_meanwhile(rank: int, world_size: int) -> None:
    signals = store()
    dist.barrier()
    if rank == 1:
        _die()
    if rank == 3:  # keeps the others waiting, so that one of them can die before they have met
        signals.wait(["rank 2 is gone"])
        horon.shrink_to_survivors()
    elif rank == 2:
        threading.Timer(0.7, _die).start()
        horon.shrink_to_survivors()
    else:
        threading.Timer(1.5, signals.set, ("rank 2 is gone", "")).start()
        horon.shrink_to_survivors()
    _check(None, [0, 3], rank)
    dist.destroy_process_group()


def test_one_that_has_come_dies_before_they_meet() -> None:
    assert_clean_exits(run_fresh_processes(_dies_meanwhile, 4), [0, _KILLED, _KILLED, 0])


def _lost_on_another_host(rank: int, world_size: int, path: str, hosts: list[int], dead: list[int]) -> None:
    os.environ["HORON_HOST_ID"] = f"host{hosts[rank]}"
    keys = dist.FileStore(path, world_size)
    dist.init_process_group("horon", store=keys, rank=rank, world_size=world_size, timeout=timedelta(seconds=50))
    dist.barrier()
    if rank in dead:
        _die()
    expect_error(lambda: dist.all_reduce(torch.ones(5)), "DistBackendError")
    horon.shrink_to_survivors(timeout=timedelta(seconds=600))  # longer than the test may take
    _check(None, [number for number in range(world_size) if number not in dead], rank)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "dead"), [([0, 1], [0]), ([0, 1, 2], [1]), ([0, 0, 1, 1], [2, 3]), ([0, 1, 2, 2], [1, 0, 3])]
)
def test_a_host_that_has_lost_all_its_ranks_is_not_waited_for(
    tmp_path: Path, hosts: list[int], dead: list[int]
) -> None:
    outcomes = run_fresh_processes(_lost_on_another_host, len(hosts), f"{tmp_path}/store", hosts, dead, init=False)
    assert_clean_exits(outcomes, [_KILLED if rank in dead else 0 for rank in range(len(hosts))])


class _DiesAtACall(dist.Store):
    """A store whose user is killed at its n-th call."""

    def __init__(self, inner: dist.Store, calls: int) -> None:
        super().__init__()
        self.inner = inner
        self.left = calls

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            _die()

    def set(self, key: str, value: object) -> None:
        self._count()
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._count()
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: object) -> None:
        self.inner.wait(keys, *timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count()
        return self.inner.compare_set(key, expected, desired)

    def clone(self) -> dist.Store:
        return self


def _dies_in_the_meeting(rank: int, world_size: int, path: str, hosts: list[int], calls: int) -> list[int]:
    os.environ["HORON_HOST_ID"] = f"host{hosts[rank]}"
    meeting = _DiesAtACall(dist.FileStore(path, world_size), 10**9)
    dist.init_process_group("horon", store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == 1:
        _die()
    expect_error(lambda: dist.barrier(), "rank 1")
    if rank == 2:
        meeting.left = calls
    while True:
        horon.shrink_to_survivors(timeout=timedelta(seconds=12))
        try:
            dist.barrier()
            break
        except dist.DistBackendError:  # it died when all had met
            continue
    meeting.left = 10**9
    numbers = [0, 2, 3] if dist.get_world_size() == 3 else [0, 3]
    _check(None, numbers, rank)
    dist.destroy_process_group()
    return numbers


@pytest.mark.parametrize("calls", [3, 14, 21])
@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_one_that_dies_in_the_meeting_is_left_out_by_all(tmp_path: Path, hosts: list[int], calls: int) -> None:
    outcomes = run_fresh_processes(_dies_in_the_meeting, 4, f"{tmp_path}/store", hosts, calls, init=False)
    is_through = outcomes[0].result == [0, 2, 3]
    assert_clean_exits(outcomes, [0, _KILLED, 0 if is_through else _KILLED, 0])
    assert outcomes[0].result == outcomes[3].result


def _is_stuck(rank: int, world_size: int) -> None:
    signals = store()
    dist.barrier()
    if rank == 1:
        signals.wait(["gone on"])
        expect_error(
            lambda: horon.shrink_to_survivors(timeout=timedelta(seconds=20)),
            "RuntimeError",
            "ranks [0, 2] have gone on without rank 1",
        )
        signals.set("told", "")
        os._exit(0)
    begin = time.monotonic()
    horon.shrink_to_survivors(timeout=timedelta(seconds=1))
    assert 0.9 < time.monotonic() - begin < 1 + STALL_S
    _check(None, [0, 2], rank)
    signals.set("gone on", "")
    signals.wait(["told"])
    dist.destroy_process_group()


def test_who_does_not_come_is_left_behind_and_told() -> None:
    assert_clean_exits(run_fresh_processes(_is_stuck, 3))


def _nobody_is_missing(rank: int, world_size: int, path: str) -> None:
    expect_error(lambda: horon.shrink_to_survivors(), "RuntimeError", "all 2 ranks are there")
    dist.destroy_process_group()
    dist.init_process_group("horon", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    with pytest.raises(ValueError, match="timeout: expected more than 0"):
        horon.shrink_to_survivors(timeout=timedelta(0))
    for size in (0, 3):
        with pytest.raises(ValueError, match="min_size: expected 1 to 2"):
            horon.shrink_to_survivors(min_size=size)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="expected a group of backend horon, got gloo"):
        horon.shrink_to_survivors(gloo)
    dist.barrier()  # Gloo minds if one leaves while it connects


def test_nobody_is_missing_and_bad_input(tmp_path: Path) -> None:
    run_ranks(_nobody_is_missing, 2, f"{tmp_path}/store")


def _too_few(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 2:
        _die()
    expect_error(lambda: dist.barrier(), "died")
    expect_error(
        lambda: horon.shrink_to_survivors(min_size=3), "RuntimeError", "2 of 3 ranks are left, [0, 1]", "min_size=3"
    )
    horon.shrink_to_survivors(min_size=2)  # who thinks better of it may
    _check(None, [0, 1], rank)
    dist.destroy_process_group()


def test_too_few_are_left() -> None:
    assert_clean_exits(run_fresh_processes(_too_few, 3), [0, 0, _KILLED])


def _over_hosts(rank: int, world_size: int, path: str, dead: list[int]) -> None:
    join(rank, [0, 0, 1, 1], path)
    dist.barrier()
    if rank in dead:
        _die()
    expect_error(lambda: dist.all_reduce(torch.ones(5)), "rank")
    # Nobody on another host sees that all of a host's ranks have died: after that time they are given up.
    horon.shrink_to_survivors(timeout=timedelta(seconds=3))
    left = [number for number in range(world_size) if number not in dead]
    _check(None, left, rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("dead", [[1], [2, 3]])
def test_between_hosts(tmp_path: Path, dead: list[int]) -> None:
    outcomes = run_fresh_processes(_over_hosts, 4, f"{tmp_path}/store", dead, init=False)
    assert_clean_exits(outcomes, [_KILLED if rank in dead else 0 for rank in range(4)])


def _by_torch(rank: int, world_size: int) -> None:
    signals = store()
    _check(None, [0, 1, 2, 3], rank)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_shrinking
    with pytest.raises(ValueError, match=f"shrink: expected ranks of this group of 4 other than .*{rank}, got 9"):
        backend.shrink([9])
    with pytest.raises(ValueError, match="shrink: expected ranks of this group of 4 other than"):
        backend.shrink([rank])
    if rank in (0, 2):  # alive, and not needed
        signals.wait(["done"])
        os._exit(0)
    dist.shrink_group([0, 2])
    _check(None, [1, 3], rank)
    dist.barrier()
    signals.set("done", "")
    dist.destroy_process_group()


def test_shrink_group_of_torch() -> None:
    assert_clean_exits(run_fresh_processes(_by_torch, 4))


def _trains(rank: int, world_size: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = last = 0.0
    done, dead_at = 0, 10
    while done < 40:
        try:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            while done < 40:
                if rank == 1 and done == dead_at:
                    _die()
                optimizer.zero_grad()
                share = slice(dist.get_rank(), None, dist.get_world_size())
                loss = torch.nn.functional.mse_loss(wrapped(x[share]), y[share])
                loss.backward()
                optimizer.step()
                done += 1
                first, last = (float(loss), last) if done == 1 else (first, float(loss))
        except RuntimeError:
            horon.shrink_to_survivors()
    sums = torch.stack([parameter.detach().sum() for parameter in model.parameters()])
    same = sums.clone()
    dist.broadcast(same, group_src=0)
    assert torch.equal(sums, same)
    dist.destroy_process_group()
    return first, last


def test_training_goes_on() -> None:
    outcomes = run_fresh_processes(_trains, 3)
    assert_clean_exits(outcomes, [0, _KILLED, 0])
    for rank in (0, 2):
        first, last = outcomes[rank].result
        assert last < first


def _store_is_gone(rank: int, world_size: int, port_file: str) -> None:
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        Path(port_file + ".new").write_text(str(served.port))
        os.rename(port_file + ".new", port_file)
        meeting = served
    else:
        while not Path(port_file).exists():
            time.sleep(0.01)
        meeting = dist.TCPStore("127.0.0.1", int(Path(port_file).read_text()), None, is_master=False)
    dist.init_process_group("horon", store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 0:
        _die()
    expect_error(lambda: dist.barrier(), "died")
    expect_error(
        lambda: horon.shrink_to_survivors(timeout=timedelta(seconds=5)),
        "RuntimeError",
        "the store can not be reached",
        within_s=20,
    )
    os._exit(0)


def test_the_store_was_in_the_rank_that_died(tmp_path: Path) -> None:
    outcomes = run_fresh_processes(_store_is_gone, 3, f"{tmp_path}/port", init=False)
    assert_clean_exits(outcomes, [_KILLED, 0, 0])


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "digits_survivors.py"
    command = [sys.executable, "-m", "horon.runner.launch", "-np", "3", "--min-np", "2", sys.executable]
    process = subprocess.Popen(
        [*command, str(example), "--epochs", "6", "--pause", "0.01"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = []
    guard = threading.Timer(150, process.kill)  # its ranks end with it
    guard.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch 2"):
                victim = re.search(r"rank 0 is process (\d+)", "".join(lines))
                assert victim is not None, lines
                os.kill(int(victim[1]), signal.SIGKILL)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        guard.cancel()
    text = "".join(lines)
    assert process.wait() == 0, text
    assert "epoch 2, 3 ranks" in text and "epoch 6, 2 ranks" in text, text
    accuracy = re.search(r"epoch 6, 2 ranks: ([0-9.]+)%", text)
    assert accuracy is not None and float(accuracy[1]) > 90
