"""Process sets: static, dynamic, overlapping; join."""

from __future__ import annotations

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _static(rank: int, size: int) -> None:
    import horon.torch as hvd

    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.size() is None and even.rank() is None
    with horovod(process_sets=[even, odd]):
        mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
        assert mine.included() and not other.included()
        assert mine.rank() == rank // 2 and mine.size() == len(mine.ranks)
        with pytest.raises(ValueError, match="not part of"):
            other.rank()
        assert hvd.global_process_set.ranks == list(range(size)) and hvd.global_process_set.rank() == rank
        x = torch.full((3,), float(rank))
        for _ in range(3):  # sets do not shift each other's names
            assert hvd.allreduce(x, op=hvd.Sum, process_set=mine).tolist() == [float(sum(mine.ranks))] * 3
        if rank == 0:
            hvd.allreduce(x, op=hvd.Sum, process_set=mine) if mine.size() == 1 else None
        assert hvd.allgather(x[:1], process_set=mine).tolist() == [float(r) for r in mine.ranks]
        root = mine.ranks[-1]
        assert hvd.broadcast(x, root, process_set=mine).tolist() == [float(root)] * 3
        assert hvd.broadcast_object(rank, root, process_set=mine) == root
        n = mine.size()
        assert hvd.alltoall(torch.arange(n) + 10 * rank, process_set=mine).tolist() == [
            mine.rank() + 10 * r for r in mine.ranks
        ]
        assert hvd.reducescatter(torch.ones(n), op=hvd.Sum, process_set=mine).tolist() == [float(n)]
        hvd.barrier(process_set=mine)
        with pytest.raises(ValueError):
            hvd.allreduce(x, process_set=other)
        with pytest.raises(ValueError):
            hvd.barrier(process_set=other)
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.allreduce(x, op=hvd.Adasum, process_set=mine)
        assert hvd.allreduce(x, op=hvd.Max).tolist() == [size - 1.0] * 3
    assert even.process_set_id is None, "ids end with shutdown"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_static(size: int) -> None:
    run_ranks(_static, size)


def _split_communicator(rank: int, size: int) -> None:
    import horon.torch as hvd

    mine, first = hvd.ProcessSet(range(rank % 2, size, 2)), hvd.ProcessSet([0, 1])
    mine.mpi_comm = object()  # As if made of MPI.COMM_WORLD.Split(rank % 2).
    with horovod(process_sets=[mine, first]):
        assert (mine.process_set_id, first.process_set_id) == (1 + rank % 2, 3)
        assert mine.included() and mine.size() == len(mine.ranks)
        x = torch.full((3,), float(rank))
        assert hvd.allreduce(x, op=hvd.Sum, process_set=mine).tolist() == [float(sum(mine.ranks))] * 3
        hvd.init(process_sets=[mine])  # again
        hvd.barrier()


@pytest.mark.parametrize("size", [3, 4])
def test_parts_of_a_communicator(size: int) -> None:
    run_ranks(_split_communicator, size)


def _duplicates(rank: int, size: int) -> None:
    import horon.torch as hvd

    for sets in ([hvd.ProcessSet([0]), hvd.ProcessSet([0])], [hvd.ProcessSet(range(size))]):
        with pytest.raises(ValueError, match=f"entry number {len(sets) - 1} is a duplicate"):
            hvd.init(process_sets=sets)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="list of process ranks"):
        hvd.ProcessSet(["a"])


def test_duplicates() -> None:
    run_ranks(_duplicates, 2)


def _dynamic(rank: int, size: int) -> None:
    with horovod(process_sets="dynamic") as hvd:
        for _ in range(3):
            added = hvd.add_process_set([size - 1, 0])
            assert added.ranks == [0, size - 1]
            with pytest.raises(ValueError, match="duplicate process set"):
                hvd.add_process_set(hvd.ProcessSet([0, size - 1]))
            with pytest.raises(ValueError, match="ranks from 0"):
                hvd.add_process_set([size])
            if added.included():
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=added).tolist() == [2.0, 2.0]
            assert hvd.remove_process_set(added)
            assert added.process_set_id is None
            assert not hvd.remove_process_set(added)
        assert not hvd.remove_process_set(hvd.global_process_set)


def test_dynamic() -> None:
    run_ranks(_dynamic, 3)


def _join(rank: int, size: int) -> None:
    with horovod() as hvd:
        for _ in range(2):
            for step in range(rank + 1):  # the last rank has the most
                mean = hvd.allreduce(torch.full((3,), 6.0), name=f"step{step}")
                assert mean.tolist() == [6.0 * (size - step) / size] * 3
            assert hvd.join() == size - 1
            # Unnamed operations match again, though ranks have called different numbers of them.
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_join(size: int) -> None:
    run_ranks(_join, size)
