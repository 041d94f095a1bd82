"""send, recv and their batches, of CUDA tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_harness import on_nccl, run_ranks
from gpu_tensors import MOVED, NCCL_BACKEND_LACKS, SIZES, check_equal, moved_input, on_gpu, output
from harness import Cases


def _send_recv(rank: int, n: int) -> None:
    cases = Cases()
    if rank > 1:
        return
    for dtype in MOVED:
        if on_nccl() and dtype in NCCL_BACKEND_LACKS:
            continue
        for count in SIZES if dtype is torch.float32 else (1, 1000):
            if on_nccl() and count == 0:
                continue
            with cases(f"{dtype} {count} elements"):
                if rank == 0:
                    dist.send(on_gpu(moved_input(0, count, dtype)), 1)
                    found = output(count, dtype)
                    dist.recv(found, 1)
                    check_equal(found, moved_input(1, count, dtype))
                else:
                    found = output(count, dtype)
                    dist.recv(found, 0)
                    check_equal(found, moved_input(0, count, dtype))
                    dist.send(on_gpu(moved_input(1, count, dtype)), 0)
    cases.check()


@pytest.mark.parametrize("n", [2, 3])
def test_send_and_recv(n: int) -> None:
    run_ranks(_send_recv, n)


def _ring(rank: int, n: int) -> None:
    cases = Cases()
    left, right = (rank - 1) % n, (rank + 1) % n
    for count in (1, 1000, 300001):
        with cases(f"batch of {count}"):
            found = output(count, torch.float32)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, on_gpu(moved_input(rank, count, torch.float32)), right),
                    dist.P2POp(dist.irecv, found, left),
                ]
            )
            for work in works:
                work.wait()
            check_equal(found, moved_input(left, count, torch.float32))
        with cases(f"exchange of {count} with all"):
            others = [r for r in range(n) if r != rank]
            received = {r: output(count + r, torch.int32) for r in others}
            operations = [dist.P2POp(dist.irecv, received[r], r) for r in others]
            operations += [
                dist.P2POp(dist.isend, on_gpu(moved_input(rank, count + rank, torch.int32)), r) for r in others
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for r in others:
                check_equal(received[r], moved_input(r, count + r, torch.int32))
        with cases(f"several of {count} between two"):
            if rank < 2:
                found = [output(count, torch.float32) for _ in range(4)]
                operations = [dist.P2POp(dist.irecv, tensor, 1 - rank) for tensor in found]
                sent = [on_gpu(moved_input(rank, count, torch.float32, seed=i)) for i in range(4)]
                operations += [dist.P2POp(dist.isend, tensor, 1 - rank) for tensor in sent]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                for i, tensor in enumerate(found):
                    check_equal(tensor, moved_input(1 - rank, count, torch.float32, seed=i))
    cases.check()


@pytest.mark.parametrize("n", [2, 4])
def test_batches(n: int) -> None:
    run_ranks(_ring, n)


def _between_collectives(rank: int, n: int) -> None:
    """Sends and receives in flight while collectives run."""
    summed = on_gpu(moved_input(rank, 1000, torch.float32))
    if rank == 0:
        pending = dist.isend(on_gpu(moved_input(0, 70001, torch.float32)), 1)
        dist.all_reduce(summed)
        pending.wait()
    else:
        found = output(70001, torch.float32)
        pending = dist.irecv(found, 0)
        dist.all_reduce(summed)
        pending.wait()
        check_equal(found, moved_input(0, 70001, torch.float32))


def test_beside_collectives() -> None:
    run_ranks(_between_collectives, 2)
