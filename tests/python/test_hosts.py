"""Collectives of groups whose ranks do not all share memory."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks
from host_groups import group_over_hosts, join
from operations import KINDS, start

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo: is what carries them")

LAYOUTS = [[0, 1], [0, 0, 1], [0, 1, 2]]
"""Host of each rank."""


def _sparse(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for nnz in (0, rank, 5, 20_000):
            tensor = torch.sparse_coo_tensor(torch.arange(nnz)[None] % 1000, torch.ones(nnz, 3), (1000, 3))
            summed = tensor.to_dense()
            dist.all_reduce(tensor)
            dist.all_reduce(summed)
            assert torch.equal(tensor.to_dense(), summed)
        expect_error(lambda: dist.all_reduce(torch.zeros(3 + rank).to_sparse()), "rank 0 called it with")
        dist.all_reduce(torch.zeros(3).to_sparse())


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_sparse_tensors(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_sparse, len(hosts), hosts, str(tmp_path / "store"), init=False, env={"HORON_SPARSE": "on"})


def _every_kind(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for count in (0, 1, 1000, 1_500_000):
            for kind in KINDS:
                work, outputs, values = start(kind, rank, world_size, count)
                work.wait()
                for output, value in zip(outputs, values, strict=False):
                    assert (output == value).all(), (kind, count, output[:4], value)


@pytest.mark.parametrize("hosts", [*LAYOUTS, [0, 1, 0, 1], [0, 0, 0, 1, 1]], ids=str)
def test_every_kind_of_collective(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_every_kind, len(hosts), hosts, str(tmp_path / "store"), init=False)


@pytest.mark.parametrize("env", [{"HORON_CARRIER": "gloo"}, {"HORON_HIERARCHICAL": "off"}], ids=str)
def test_every_kind_in_other_ways(env: dict[str, str], tmp_path: Path) -> None:
    run_ranks(_every_kind, 3, [0, 0, 1], str(tmp_path / "store"), init=False, env=env)


def _no_interface(rank: int, world_size: int, hosts: list[int], path: str, without: int) -> None:
    if rank == without:
        os.environ["HORON_IFACE"] = "nowhere0"
    # The last one is the coordinator of nobody, so that its interfaces do not count.
    expected = "hosts, gloo" if without < 2 else "hosts, tcp"
    with group_over_hosts(rank, hosts, path, expected=expected):
        for count in (3, 300_000):
            total = torch.full((count,), float(rank))
            dist.all_reduce(total)
            assert (total == sum(range(world_size))).all()


@pytest.mark.parametrize("without", [0, 1, 2])
def test_gloo_carries_what_a_rank_can_not_connect_for(without: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_no_interface, 3, [0, 1, 1], path, without, init=False, timeout=60)
    warns = without < 2
    assert ("goes over Gloo" in outcomes[without].stderr and "nowhere0" in outcomes[without].stderr) == warns
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.stderr


def _without_gloo(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for count in (3, 300_000):
            total = torch.full((count,), float(rank))
            dist.all_reduce(total)
            assert (total == sum(range(world_size))).all()
        message = torch.zeros(4)
        work = dist.isend(torch.full((4,), float(rank)), (rank + 1) % world_size)
        dist.recv(message, (rank - 1) % world_size)
        work.wait()
        assert (message == (rank - 1) % world_size).all()


@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 1], [0, 0, 1, 1]])
def test_no_gloo_group_is_made_where_ranks_can_connect(hosts: list[int], tmp_path: Path) -> None:
    env = {"HORON_TEST_FORBID_GLOO": "1", "HORON_CARRIER": "tcp"}
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_without_gloo, len(hosts), hosts, path, init=False, timeout=60, env=env)
    assert_clean_exits(outcomes)


def _arithmetic(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags)
        assert flags.dtype == torch.bool and flags.tolist() == [True, True, False]
        halves = torch.full((5,), 1.0 + rank * 2**-10, dtype=torch.float16)
        dist.all_reduce(halves, dist.ReduceOp.AVG)
        expected = torch.stack([torch.tensor(1.0 + r * 2**-10) for r in range(world_size)]).mean().half()
        assert (halves == expected).all()
        numbers = torch.tensor([float("nan") if rank == 1 else 1.0])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        assert numbers.isnan().all()
        mine = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(mine)
        copies = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(copies, mine)
        assert all(torch.equal(copy, mine) for copy in copies)


def test_arithmetic_and_identical_bits(tmp_path: Path) -> None:
    run_ranks(_arithmetic, 3, [0, 0, 1], str(tmp_path / "store"), init=False)


def _disagreement(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for _ in range(3):
            expect_error(lambda: dist.all_reduce(torch.ones(3 + rank)), "rank 0", "rank 1")
            if rank == 0:
                expect_error(lambda: dist.barrier(), "barrier", "broadcast")
            else:
                expect_error(lambda: dist.broadcast(torch.ones(2), 0), "barrier", "broadcast")
            tensor = torch.ones(10)
            dist.all_reduce(tensor)
            assert (tensor == world_size).all()


def test_disagreement_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(_disagreement, 2, [0, 1], str(tmp_path / "store"), init=False)


def _ends_with_pending(rank: int, world_size: int, path: str, how: str) -> None:
    os.environ["HORON_HOST_ID"] = f"host{rank}"
    dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=world_size)
    dist.barrier()
    if rank == 0 and how == "operation":
        globals()["kept"] = [dist.all_reduce(torch.ones(count), async_op=True) for count in (5, 1 << 20)]
    elif rank == 0 and how == "waiting thread":
        entered = threading.Event()
        threading.Thread(target=lambda: (entered.set(), dist.barrier()), daemon=True).start()
        entered.wait()
    elif rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "killed peer":
        expect_error(lambda: dist.all_reduce(torch.ones(5)), within_s=10)


@pytest.mark.parametrize("how", ["operation", "waiting thread", "killed peer"])
def test_bad_ends(how: str, tmp_path: Path) -> None:
    outcomes = run_fresh_processes(
        _ends_with_pending,
        2,
        str(tmp_path / "store"),
        how,
        init=False,
        timeout=30,
        env={"TORCH_INCLUDE_STACK_TRACE": "0"},
    )
    assert_clean_exits(outcomes, [-signal.SIGKILL if how == "killed peer" else 0, 0])


def _gloo_fails_on_one(rank: int, world_size: int, path: str) -> None:
    gloo = dist.ProcessGroupGloo

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no descriptors are left")

    def join() -> None:
        with group_over_hosts(rank, [0, 1, 1], path, timeout_s=50):
            total = torch.ones(3)
            dist.all_reduce(total)
            assert (total == world_size).all()

    if rank == 1:
        dist.ProcessGroupGloo = refuse
    expect_error(join, "DistBackendError", "rank 1 could not make", "no descriptors are left", within_s=20)
    dist.ProcessGroupGloo = gloo
    join()  # with the same store, whose notes are of another attempt


def test_gloo_that_fails_on_one_rank_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    env = {"HORON_CARRIER": "gloo"}
    assert_clean_exits(run_fresh_processes(_gloo_fails_on_one, 3, path, init=False, timeout=60, env=env))


def _dead_before_a_group_is_made(
    rank: int, world_size: int, hosts: list[int], path: str, dead: int, members: list[int]
) -> None:
    join(rank, hosts, path, timeout_s=600)  # longer than the test may take
    dist.barrier()
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in members:
        named = ", ".join(map(str, members[:-1])) + f" and {members[-1]}"
        expect_error(lambda: dist.new_group(members), f"rank {dead} (pid ", f"died before the group of ranks {named} ")
    else:
        dist.new_group(members)
    left = [number for number in range(world_size) if number != dead]
    group = dist.new_group(left)
    numbers = torch.tensor([float(rank)])
    dist.all_reduce(numbers, group=group)
    assert numbers.item() == sum(left)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "dead", "members"),
    [([0, 1], 1, [0, 1]), ([0, 0, 1], 1, [0, 1, 2]), ([0, 0, 1], 2, [1, 2]), ([0, 1, 1, 2], 0, [0, 2, 3])],
    ids=str,
)
def test_a_group_with_a_rank_that_is_dead(tmp_path: Path, hosts: list[int], dead: int, members: list[int]) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(
        _dead_before_a_group_is_made, len(hosts), hosts, path, dead, members, init=False, timeout=60
    )
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == dead else 0 for rank in range(len(hosts))])
