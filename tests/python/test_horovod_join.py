"""hvd.join() beside the DistributedOptimizer: ranks with different numbers of batches, or none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

# Batches of each rank in each epoch.
EPOCHS = {
    "none in the first epoch": [[0, 3], [2, 2], [0, 1]],
    "none ever": [[0, 2], [0, 1]],
    "fewer": [[2, 3], [3, 1], [0, 2], [2, 0]],
}


def _parameter_and_optimizer(hvd: Any) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.zeros(5))
    return parameter, hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])


def _uneven(rank: int, size: int, epochs: list[list[int]]) -> None:
    with horovod() as hvd:
        parameter, optimizer = _parameter_and_optimizer(hvd)
        for batches in epochs:
            with torch.no_grad():
                parameter.zero_()
            for _ in range(batches[rank]):
                optimizer.zero_grad()
                (parameter * (rank + 1)).sum().backward()
                optimizer.step()
            hvd.join()
            # Those with a batch contribute to every step; the average is over all ranks.
            longest = batches.index(max(batches))
            expected = -sum((r + 1) * n for r, n in enumerate(batches)) / size
            torch.testing.assert_close(hvd.broadcast(parameter.detach(), longest), torch.full((5,), expected))
        later, later_optimizer = _parameter_and_optimizer(hvd)  # wrapped after joins
        (later * rank).sum().backward()
        later_optimizer.step()
        torch.testing.assert_close(later.detach(), torch.full((5,), -sum(range(size)) / size))


@pytest.mark.parametrize("which", list(EPOCHS))
def test_ranks_without_batches(which: str) -> None:
    run_ranks(_uneven, 2, EPOCHS[which])


def _differ_while_one_has_joined(rank: int, size: int) -> None:
    with horovod() as hvd:
        if rank < 2:
            parameter = nn.Parameter(torch.zeros(5 + rank))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
            parameter.sum().backward()
            with pytest.raises(hvd.HorovodInternalError, match="differ between ranks"):
                optimizer.step()
        hvd.join()


def test_layouts_that_differ_while_a_rank_has_joined() -> None:
    run_ranks(_differ_while_one_has_joined, 3)


def _differ_after_a_join(rank: int, size: int) -> None:
    """The rank without batches in the first epoch has another model; the second epoch tells."""
    with horovod() as hvd:
        parameter = nn.Parameter(torch.zeros(5 + rank))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
        if rank == 0:
            parameter.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()
        parameter.sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=rf"differ between ranks.*rank\(s\) \[{1 - rank}\]"):
            optimizer.step()


def test_layouts_that_differ_after_a_join() -> None:
    run_ranks(_differ_after_a_join, 2)


def _after_a_new_start(rank: int, size: int) -> None:
    """An optimizer that outlives hvd.shutdown(), as in elastic training; only one rank has used it before."""
    with horovod() as hvd:
        parameter, optimizer = _parameter_and_optimizer(hvd)
        if rank == 0:
            parameter.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()
    with horovod() as hvd:
        with torch.no_grad():
            parameter.zero_()
        (parameter * rank).sum().backward()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((5,), -sum(range(size)) / size))


def _beside_a_later_one(rank: int, size: int) -> None:
    """Both compare their layouts at once, under different names."""
    with horovod() as hvd:
        old, old_optimizer = _parameter_and_optimizer(hvd)
        (old * rank).sum().backward()
        old_optimizer.step()
        old_optimizer.zero_grad()
    with horovod() as hvd:
        new = nn.Parameter(torch.zeros(3))
        new_optimizer = hvd.DistributedOptimizer(torch.optim.SGD([new], lr=1.0), [("new", new)])
        (new * rank).sum().backward()
        (old * rank).sum().backward()
        old_optimizer.step()
        new_optimizer.step()
        mean = sum(range(size)) / size
        torch.testing.assert_close(old.detach(), torch.full((5,), -2 * mean))
        torch.testing.assert_close(new.detach(), torch.full((3,), -mean))


def test_an_optimizer_from_before_a_new_start_beside_a_later_one() -> None:
    run_ranks(_beside_a_later_one, 2)


def test_one_rank_has_used_the_optimizer_before_a_new_start() -> None:
    run_ranks(_after_a_new_start, 2)
