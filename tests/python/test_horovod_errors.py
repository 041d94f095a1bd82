"""Ranks that disagree get an error on every rank, and the job goes on. What is wrong by itself is a ValueError."""

from __future__ import annotations

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


_HOROVODS_TEXT = (
    "^Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)
"""What scripts look for that start over."""


def _mismatches(rank: int, size: int) -> None:
    with horovod() as hvd:
        first = rank == 0
        cases = {
            "Mismatched data types": lambda: hvd.allreduce(torch.ones(3).to(torch.int32 if first else torch.float32)),
            "Mismatched ALLREDUCE tensor shapes": lambda: hvd.allreduce(torch.ones(3 if first else 4)),
            "Mismatched prescale and/or postscale factors": lambda: hvd.allreduce(
                torch.ones(3), prescale_factor=0.5 if first else 1.0
            ),
            "Mismatched reduction operation": lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if first else hvd.Max),
            "root ranks": lambda: hvd.broadcast(torch.ones(3), 0 if first else 1),
            "Mismatched BROADCAST tensor shapes": lambda: hvd.broadcast(torch.ones(3 if first else 4), 0),
            "Mismatched ALLGATHER tensor shapes": lambda: hvd.allgather(torch.ones(3, 2 if first else 4)),
        }
        for message, call in cases.items():
            with pytest.raises(hvd.HorovodInternalError, match=message):
                call()
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after").tolist() == [size] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_mismatches(size: int) -> None:
    run_ranks(_mismatches, size)


def _bad_by_itself(rank: int, size: int) -> None:
    with horovod() as hvd:
        x = torch.ones(3)
        handle = hvd.allreduce_async(x, name="twice") if rank == 0 else None
        if rank == 0:
            with pytest.raises(ValueError):
                hvd.allreduce_async(x, name="twice")
        hvd.barrier()
        if rank != 0:
            handle = hvd.allreduce_async(x, name="twice")
        assert hvd.synchronize(handle).tolist() == [1.0] * 3
        for bad in (torch.ones(3).to_sparse(), torch.ones(2, 2).t(), torch.ones(3, device="meta")):
            with pytest.raises(ValueError):
                hvd.allreduce(bad)
        with pytest.raises(ValueError):
            hvd.broadcast(x, -1)
        never_added = hvd.ProcessSet([0])
        with pytest.raises(ValueError, match="was not added"):
            hvd.allreduce(x, process_set=never_added)
        with pytest.raises(ValueError, match="expected tensors"):
            hvd.broadcast_parameters([1, x], 0)
        hvd.barrier()


def _bad_on_one_rank(rank: int, size: int) -> None:
    with horovod() as hvd:
        transposed, no_rows = torch.ones(2, 3).t(), torch.tensor(1.0)
        unsupported = torch.ones(2, dtype=torch.bool)
        bad = [
            lambda: hvd.allreduce(transposed),
            lambda: hvd.allreduce_(unsupported, op=hvd.Average),
            lambda: hvd.grouped_allreduce([torch.ones(2), unsupported], op=hvd.Average),
            lambda: hvd.allgather(no_rows),
            lambda: hvd.grouped_allgather([no_rows]),
            lambda: hvd.broadcast(transposed, 0),
            lambda: hvd.broadcast(torch.ones(2), size),
            lambda: hvd.alltoall(torch.ones(2 * size), splits=[3] * size),
            lambda: hvd.reducescatter(unsupported, op=hvd.Average),
            lambda: hvd.grouped_reducescatter([unsupported], op=hvd.Average),
        ]
        for call in bad:
            if rank == 1:
                with pytest.raises(ValueError):
                    call()
        # The ranks still count operations without a name alike.
        x = torch.full((2 * size,), float(rank))
        total = sum(range(size))
        assert (hvd.allreduce(x, op=hvd.Sum) == total).all()
        assert (hvd.grouped_allreduce([x], op=hvd.Sum)[0] == total).all()
        assert hvd.allgather(x).shape == (2 * size * size,)
        assert hvd.grouped_allgather([x])[0].shape == (2 * size * size,)
        assert (hvd.broadcast(x, 0) == 0).all()
        assert hvd.alltoall(x).shape == x.shape
        assert (hvd.reducescatter(x, op=hvd.Sum) == total).all()
        assert (hvd.grouped_reducescatter([x], op=hvd.Sum)[0] == total).all()


def test_what_one_rank_does_wrong_shifts_no_numbers() -> None:
    run_ranks(_bad_on_one_rank, 2)


def test_bad_by_itself() -> None:
    run_ranks(_bad_by_itself, 2)


def _in_flight_at_shutdown(rank: int, size: int) -> None:
    import horon.torch as hvd

    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), name="x") if rank == 0 else None
    hvd.shutdown()
    if rank == 0:
        with pytest.raises(hvd.HorovodInternalError, match=_HOROVODS_TEXT + r".*hvd\.shutdown"):
            hvd.synchronize(handle)
    for collective in (lambda: hvd.allreduce(torch.ones(2)), hvd.barrier, lambda: hvd.allgather(torch.ones(2))):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            collective()  # as in Horovod; and for elastic.run to start over
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2
    hvd.shutdown()


def test_in_flight_at_shutdown() -> None:
    run_ranks(_in_flight_at_shutdown, 2)


def _no_handles(rank: int, size: int) -> None:
    with horovod() as hvd:
        wait = hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "sparse", hvd.Sum)
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        for function in (hvd.synchronize, hvd.poll):
            for bad in (None, "x", 1.5, [handle], torch.ones(2)):
                with pytest.raises(TypeError, match=rf"hvd\.{function.__name__}\(\) expects a handle, the int .* got"):
                    function(bad)
            with pytest.raises(TypeError, match=r"Call it: it is what sparse_allreduce_async\(\) returned"):
                function(wait)
        assert hvd.synchronize(handle).tolist() == [size] * 2
        for gone in (handle, 99999, -1, -(2**70), 2**70):
            assert hvd.synchronize(gone) is None
            with pytest.raises(ValueError, match=f"Handle {gone} was not created or has been cleared"):
                hvd.poll(gone)
        assert wait().to_dense().tolist() == [size] * 2


def test_what_is_no_handle() -> None:
    run_ranks(_no_handles, 2)
