"""Gradients through collectives, as Horovod defines them."""

from __future__ import annotations

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def _gradients(rank: int, size: int) -> None:
    with horovod() as hvd:
        total, mean = sum(range(1, size + 1)), (size + 1) / 2
        weight = float(rank + 1)

        x = _leaf(4)
        (hvd.allreduce(x, op=hvd.Sum) * weight).sum().backward()
        assert x.grad.tolist() == [total] * 4
        x = _leaf(4)
        (hvd.allreduce(x) * weight).sum().backward()
        assert x.grad.tolist() == [mean] * 4
        x = _leaf(4)
        (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) * weight).sum().backward()
        assert x.grad.tolist() == [total] * 4

        x, y = _leaf(4), _leaf(2, 3)
        a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
        (a.sum() * weight + b.sum() * 2).backward()
        assert x.grad.tolist() == [total] * 4 and y.grad.flatten().tolist() == [2 * size] * 6

        x = _leaf(rank + 1, 2)
        gathered = hvd.allgather(x)
        (gathered * torch.arange(float(gathered.shape[0])).unsqueeze(1)).sum().backward()
        first = rank * (rank + 1) // 2
        assert x.grad[:, 0].tolist() == [float(row) for row in range(first, first + rank + 1)]

        x, y = _leaf(2), _leaf(rank + 1)
        a, b = hvd.grouped_allgather([x, y])
        (a.sum() * weight + b.sum()).backward()
        assert x.grad.tolist() == [mean] * 2 and y.grad.tolist() == [1.0] * (rank + 1)

        x = _leaf(3)
        (hvd.broadcast(x, 1 % size) * weight).sum().backward()
        assert x.grad.tolist() == [mean if rank == 1 % size else 0.0] * 3

        x = _leaf(size * 2)
        (hvd.alltoall(x) * weight).sum().backward()
        assert x.grad.tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
        x = _leaf(size)
        output, received = hvd.alltoall(x, splits=[1] * size)
        assert not received.requires_grad
        (output * weight).sum().backward()
        assert x.grad.tolist() == [float(r + 1) for r in range(size)]

        x = _leaf(size)
        (hvd.reducescatter(x, op=hvd.Sum) * weight).sum().backward()
        assert x.grad.tolist() == [size * (r + 1.0) for r in range(size)]
        x = _leaf(size)
        (hvd.reducescatter(x) * weight).sum().backward()
        assert x.grad.tolist() == [r + 1.0 for r in range(size)]
        x = _leaf(size)
        (hvd.grouped_reducescatter([x], op=hvd.Sum)[0] * weight).sum().backward()
        assert x.grad.tolist() == [size * (r + 1.0) for r in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients(size: int) -> None:
    run_ranks(_gradients, size)
