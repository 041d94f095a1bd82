"""all_reduce of sparse COO tensors, where HORON_SPARSE is on, and DDP with sparse gradients on top of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, on_gloo, run_ranks
from torch.nn.parallel import DistributedDataParallel

ON = {"HORON_SPARSE": "on"}
# Of a complex sparse tensor, torch.distributed passes a real copy to any backend.
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]


def _sparse(rank: int, nnz: int, sizes: tuple[int, ...], sparse_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose places come more than once where `nnz` is large. Small whole numbers: every sum is exact."""
    random = torch.Generator().manual_seed(100 * rank + nnz)
    indices = torch.stack([torch.randint(0, size, (nnz,), generator=random) for size in sizes[:sparse_dim]])
    values = torch.randint(0, 4, (nnz, *sizes[sparse_dim:]), generator=random).to(dtype)
    return torch.sparse_coo_tensor(indices, values, sizes)


def _dense_sum(everyones: list[torch.Tensor]) -> torch.Tensor:
    dtype = everyones[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    widened = [torch.sparse_coo_tensor(one._indices(), one._values().to(wide), one.shape) for one in everyones]
    return torch.stack([one.to_dense() for one in widened]).sum(0).to(dtype)


SHAPES = [((10,), 1), ((10, 3), 1), ((6, 5), 2), ((6, 5, 4, 3), 2), ((50_000, 8), 1)]


def _matrix(rank: int, world_size: int, dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for dtype in dtypes:
        for sizes, sparse_dim in SHAPES:
            # Everywhere as many; some ranks with none; nowhere any; more than places.
            for nnzs in ([5] * world_size, [7 * r for r in range(world_size)], [0] * world_size, [3000] * world_size):
                everyones = [_sparse(r, nnz, sizes, sparse_dim, dtype) for r, nnz in enumerate(nnzs)]
                expected = _dense_sum(everyones)
                for is_async in (False, True):
                    with cases(f"{dtype} {sizes} {sparse_dim} {nnzs} async={is_async}"):
                        tensor = everyones[rank].clone()
                        work = dist.all_reduce(tensor, async_op=is_async)
                        if work is not None:
                            work.wait()
                        assert tensor.is_sparse and tensor.is_coalesced()
                        assert torch.equal(tensor.to_dense(), expected)
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sum(world_size: int) -> None:
    dtypes = FLOATS[:2] if on_gloo() else FLOATS + INTEGERS
    run_ranks(_matrix, world_size, dtypes, timeout=120, env=ON)


def _average(rank: int, world_size: int) -> None:
    for dtype in FLOATS:
        everyones = [_sparse(r, 6, (20, 2), 1, dtype) for r in range(world_size)]
        tensor = everyones[rank].coalesce()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        expected = _dense_sum(everyones).double() / world_size
        torch.testing.assert_close(tensor.to_dense().double(), expected, rtol=1e-2, atol=1e-2)
    for dtype in INTEGERS:
        everyones = [_sparse(r, 6, (20, 2), 1, dtype) for r in range(world_size)]
        tensor = everyones[rank].coalesce()
        if dtype.is_signed:
            tensor.neg_()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        expected = _dense_sum(everyones).long().div(world_size, rounding_mode="trunc")
        assert torch.equal(tensor.to_dense().long(), -expected if dtype.is_signed else expected)
    half = torch.sparse_coo_tensor([[0]], torch.tensor([2048.0], dtype=torch.float16), (1,))
    if rank > 0:
        half = torch.sparse_coo_tensor([[0, 0]], torch.tensor([1.0, 1.0], dtype=torch.float16), (1,))
    dist.all_reduce(half)
    assert half.to_dense().item() == 2048 + 2 * (world_size - 1)  # added in float16 it would stay 2048


def test_average_and_half_types() -> None:
    gloo_lacks("AVG of sparse tensors")
    run_ranks(_average, 3, env=ON)


def _in_order(rank: int, world_size: int) -> None:
    tensors = [_sparse(rank, 4, (30, 2), 1, torch.float32) for _ in range(3)]
    dense = torch.full((1000,), float(rank))
    works = [dist.all_reduce(tensors[0], async_op=True), dist.all_reduce(dense, async_op=True)]
    works += [dist.all_reduce(tensor, async_op=True) for tensor in (tensors[1], tensors[1], tensors[2])]
    future = works[0].get_future()
    for work in reversed(works):
        work.wait()
    total = _dense_sum([_sparse(r, 4, (30, 2), 1, torch.float32) for r in range(world_size)])
    assert torch.equal(tensors[0].to_dense(), total)
    assert torch.equal(tensors[1].to_dense(), total * world_size)
    assert torch.equal(tensors[2].to_dense(), total)
    assert (dense == sum(range(world_size))).all()
    assert future.wait()[0].is_sparse


@pytest.mark.parametrize("world_size", [2, 3])
def test_among_other_operations(world_size: int) -> None:
    gloo_lacks("two reductions of one tensor in flight")
    run_ranks(_in_order, world_size, env=ON)


def _disagree(rank: int, world_size: int) -> None:
    cases = {
        "sizes": [torch.zeros(3 + rank, 2).to_sparse(1)],
        "dtype": [torch.zeros(3, 2, dtype=[torch.float32, torch.float64][rank % 2]).to_sparse(1)],
        "sparse dimensions": [torch.zeros(3, 2).to_sparse(1 + rank % 2)],
        "number of dimensions": [torch.zeros([3] * (1 + rank)).to_sparse(1)],
        "the eighth of eight sizes": [torch.zeros([1] * 7 + [1 + rank]).to_sparse(1)],
        "sizes beyond the eighth dimension": [torch.zeros([1] * 8 + [1 + rank]).to_sparse(1)],
    }
    for (tensor,) in cases.values():
        text = expect_error(lambda tensor=tensor: dist.all_reduce(tensor))
        assert "rank 0 called it with" in text and "Nothing was changed" in text, text
        assert ("..." in text) == (tensor.dim() > 8), text
    tensor = torch.zeros(3).to_sparse() if rank == 0 else torch.zeros(3)
    text = expect_error(lambda: dist.all_reduce(tensor))
    assert "all_reduce_of_sparse_tensor" in text and "all_reduce(float32, 3 elements, SUM)" in text, text
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        with pytest.raises(ValueError, match="expected SUM or AVG"):
            dist.all_reduce(torch.zeros(3).to_sparse(), op=op)
    tensor = torch.ones(3).to_sparse()
    dist.all_reduce(tensor)
    assert (tensor.to_dense() == world_size).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree(world_size: int) -> None:
    gloo_lacks("hangs, or says so in other words")
    run_ranks(_disagree, world_size, env=ON)


def _off(rank: int, world_size: int) -> None:
    for is_async in (False, True):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            with pytest.raises(RuntimeError, match=r"expected a dense tensor.*to_dense.*HORON_SPARSE=on"):
                dist.all_reduce(torch.eye(3).to_sparse(), op=op, async_op=is_async)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world_size).all()


def test_off_unless_asked_for() -> None:
    gloo_lacks("always on")
    run_ranks(_off, 2)


class _Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.EmbeddingBag(200, 16, sparse=True, mode="sum")
        self.head = torch.nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


def _train(rank: int, world_size: int, view: bool) -> list[float]:
    model = DistributedDataParallel(_Bag(), gradient_as_bucket_view=view)
    alone = _Bag()  # sees everyone's words
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    losses = []
    for step in range(5):
        random = torch.Generator().manual_seed(step)
        words = torch.randint(0, 200, (world_size, 8, 5), generator=random)
        labels = torch.randint(0, 4, (world_size, 8), generator=random)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = torch.nn.functional.cross_entropy(model(words[rank]), labels[rank])
        mine.backward()
        torch.nn.functional.cross_entropy(alone(words.flatten(0, 1)), labels.flatten()).backward()
        assert model.module.table.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
        losses.append(mine.item())
    for ours, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    return losses


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_with_sparse_gradients(world_size: int, view: bool) -> None:
    run_ranks(_train, world_size, view, timeout=120, env=ON)
