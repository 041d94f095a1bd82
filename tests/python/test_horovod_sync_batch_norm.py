"""SyncBatchNorm against ordinary batch normalization of all ranks' batches together."""

from __future__ import annotations

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _compare(rank: int, size: int) -> None:
    with horovod() as hvd:
        for shape in ((3,), (3, 4), (3, 4, 5)):
            for affine, track, momentum in ((True, True, 0.1), (False, True, None), (True, False, 0.3)):
                rows = [r + 2 for r in range(size)]
                ours = hvd.SyncBatchNorm(3, momentum=momentum, affine=affine, track_running_stats=track)
                plain = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}[len(shape)](
                    3, momentum=momentum, affine=affine, track_running_stats=track
                )
                for step in range(2):
                    generator = torch.Generator().manual_seed(step)
                    whole = torch.randn(sum(rows), *shape, generator=generator) * 3 + 100
                    weights = torch.randn(whole.shape, generator=generator)
                    mine = whole.split(rows)[rank].clone().requires_grad_()
                    whole.requires_grad_()
                    expected, found = plain(whole), ours(mine)
                    torch.testing.assert_close(found, expected.split(rows)[rank], rtol=1e-4, atol=1e-4)
                    (expected * weights).sum().backward()
                    (found * weights.split(rows)[rank]).sum().backward()
                    torch.testing.assert_close(mine.grad, whole.grad.split(rows)[rank], rtol=1e-3, atol=1e-4)
                if affine:
                    for name in ("weight", "bias"):
                        total = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
                        torch.testing.assert_close(total, getattr(plain, name).grad, rtol=1e-3, atol=1e-3)
                if track:
                    torch.testing.assert_close(ours.running_mean, plain.running_mean)
                    torch.testing.assert_close(ours.running_var, plain.running_var, rtol=1e-4, atol=1e-4)
                    assert ours.num_batches_tracked == plain.num_batches_tracked
                    ours.eval()
                    plain.eval()
                    torch.testing.assert_close(ours(mine), plain(whole).split(rows)[rank], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="at least 2D"):
            ours(torch.ones(3))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_batch_norm_of_everything(size: int) -> None:
    run_ranks(_compare, size)
