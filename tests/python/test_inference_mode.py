"""Inference tensors may be changed in inference mode only, and that belongs to a thread: not to the one that runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, on_gloo, run_ranks
from horovod_session import horovod


def _send_or_recv(tensor: torch.Tensor, rank: int, world_size: int) -> dist.Work:
    return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)


def _all_gather(tensor: torch.Tensor, rank: int, world_size: int) -> dist.Work:
    return dist.all_gather([torch.empty(4, 3).t() for _ in range(world_size)], tensor, async_op=True)


CALLS: dict[str, Callable[[torch.Tensor, int, int], dist.Work]] = {
    "all_reduce": lambda tensor, rank, n: dist.all_reduce(tensor, async_op=True),
    "broadcast": lambda tensor, rank, n: dist.broadcast(tensor, 0, async_op=True),
    "all_gather": _all_gather,
    "send": _send_or_recv,
}
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.ones(3, 4),
    "not contiguous": lambda: torch.ones(4, 3).t(),
    "sparse": lambda: torch.ones(3, 4).to_sparse(),
}


def _works(rank: int, world_size: int) -> None:
    cases = Cases()
    for call_name, call in CALLS.items():
        for tensor_name, make in TENSORS.items():
            if tensor_name == "sparse" and call_name != "all_reduce":
                continue
            if on_gloo() and call_name == "send":
                continue  # has no future, and refuses what is not contiguous
            for waits_inside in (True, False):
                for by_future in (True, False):
                    with cases(f"{call_name} {tensor_name} inside={waits_inside} future={by_future}"):
                        with torch.inference_mode():
                            tensor = make()
                            work = call(tensor, rank, world_size)
                            if waits_inside:
                                work.wait()
                        if by_future:
                            work.get_future().wait()
                        work.wait()
                        expected = float(world_size) if call_name == "all_reduce" else 1.0
                        assert tensor.is_inference()
                        assert (tensor.to_dense() == expected).all()
    cases.check()


def test_works() -> None:
    run_ranks(_works, 2, env={"HORON_SPARSE": "on"})


def _named(rank: int, size: int) -> None:
    with horovod() as hvd:
        with torch.inference_mode():
            tensor = torch.ones(6)
            hvd.allreduce_(tensor, op=hvd.Sum)
            gather = hvd.allgather_async(torch.ones(2, 3))
            group = hvd.grouped_allreduce_async_([tensor[:4], tensor[2:]], op=hvd.Sum)
        assert hvd.synchronize(gather).shape == (2 * size, 3)
        hvd.synchronize(group)
        assert (tensor == size * size).all()


def test_named_operations() -> None:
    gloo_lacks("named operations")
    run_ranks(_named, 2)
