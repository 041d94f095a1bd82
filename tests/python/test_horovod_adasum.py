"""Adasum: the all-reduce against its definition, and the optimizer that combines steps."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b"""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - dot / (2 * aa) if aa > 0 else 1) + b * (1 - dot / (2 * bb) if bb > 0 else 1)


def _reference(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Pairs at distance 1, then 2, then 4, as recursive doubling does."""
    while len(tensors) > 1:
        tensors = [_pair(tensors[i], tensors[i + 1]) for i in range(0, len(tensors), 2)]
    return tensors[0]


def _tensor(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _allreduce(rank: int, size: int) -> None:
    with horovod() as hvd:
        for n in (1, 7, 1000, 70000):
            expected = _reference([_tensor(r, n) for r in range(size)])
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 2e-2)):
                found = hvd.allreduce(_tensor(rank, n).to(dtype), op=hvd.Adasum)
                torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        same = hvd.allreduce(torch.full((5,), 2.0), op=hvd.Adasum)
        torch.testing.assert_close(same, torch.full((5,), 2.0))  # of equal tensors: that tensor


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allreduce(size: int) -> None:
    run_ranks(_allreduce, size)


def _three(rank: int, size: int) -> None:
    with horovod() as hvd:
        with pytest.raises(NotImplementedError, match="non-power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        with pytest.raises(NotImplementedError, match="non-power of 2"):
            hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)


def test_needs_a_power_of_two() -> None:
    run_ranks(_three, 3)


def _optimizer(rank: int, size: int) -> None:
    with horovod() as hvd:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        models = [copy.deepcopy(model) for _ in range(size)]
        plain = [torch.optim.Adam(m[0].parameters(), lr=0.05) for m in models]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model[0].parameters(), lr=0.05), model.named_parameters(), op=hvd.Adasum
        )
        with pytest.raises(AssertionError) if size > 1 else _nothing(), optimizer.skip_synchronize():
            pass
        for step in range(3):
            if step == 0:  # the first layer's bias is unfrozen in the next step
                for each in (model, *models):
                    each[0].bias.requires_grad_(False)
            if step == 1:
                for each in (model, *models):
                    each[0].bias.requires_grad_()
                for each, own in zip([model, *models], [optimizer, *plain], strict=True):
                    own.add_param_group({"params": each[2].parameters()})
            starts = [p.detach().clone() for p in models[0].parameters()]
            for r in range(size):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + r))
                plain[r].zero_grad()
                models[r](x).square().mean().backward()
                plain[r].step()
                if r == rank:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
            for i, (start, mine) in enumerate(zip(starts, model.parameters(), strict=True)):
                deltas = [list(m.parameters())[i].detach() - start for m in models]
                combined = start + _reference(deltas)
                torch.testing.assert_close(mine.detach(), combined, rtol=1e-4, atol=1e-5)
                for m in models:
                    with torch.no_grad():
                        list(m.parameters())[i].copy_(mine)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("size", [1, 2])
def test_optimizer(size: int) -> None:
    run_ranks(_optimizer, size)
