"""Every collective of horon.torch against a plain reference: dtypes, shapes, async, in place, grouped."""

from __future__ import annotations

import pytest
import torch
from harness import Cases, on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (17,), (5, 3), (2, 3, 4), (70000,)]


def _tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def _reference(tensors: list[torch.Tensor], op: int) -> torch.Tensor:
    stacked = torch.stack([tensor.double() for tensor in tensors])
    result = {
        0: stacked.mean(0),
        1: stacked.sum(0),
        3: stacked.amin(0),
        4: stacked.amax(0),
        5: stacked.prod(0),
    }[op]
    dtype = tensors[0].dtype
    return (result if dtype.is_floating_point else result.trunc()).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(found.dtype, 1e-6)
    torch.testing.assert_close(found, expected, rtol=loose, atol=loose)


def _allreduce(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in REDUCED:
            for shape in SHAPES:
                for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                    with cases(f"{dtype} {shape} {op}"):
                        tensors = [_tensor(r, shape, dtype) for r in range(size)]
                        expected, mine = _reference(tensors, op), tensors[rank].clone()
                        _close(hvd.allreduce(mine, op=op), expected)
                        assert torch.equal(mine, tensors[rank]), "the input was changed"
                        _close(hvd.synchronize(hvd.allreduce_async(mine, op=op, name="n")), expected)
                        assert hvd.allreduce_(mine, op=op) is mine
                        _close(mine, expected)
        cases.check()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_allreduce(size: int) -> None:
    run_ranks(_allreduce, size, timeout=120)


def _defaults_and_scaling(rank: int, size: int) -> None:
    with horovod() as hvd:
        x = torch.arange(6.0) + rank
        mean = torch.arange(6.0) + (size - 1) / 2
        torch.testing.assert_close(hvd.allreduce(x), mean)
        with pytest.warns(DeprecationWarning, match="average"):
            torch.testing.assert_close(hvd.allreduce(x, average=False), mean * size)
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(x, average=True, op=hvd.Sum)
        scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        torch.testing.assert_close(scaled, mean * size * 1.5)
        whole = torch.full((3,), 7, dtype=torch.int32)
        assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist() == [3 * size] * 3
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            reduced = hvd.allreduce(x, compression=compression)
            assert reduced.dtype == torch.float32
            torch.testing.assert_close(reduced, mean, rtol=1e-2, atol=1e-2)
            assert hvd.allreduce(whole, compression=compression, op=hvd.Max).dtype == torch.int32
        with pytest.raises(ValueError, match="required to be contiguous"):
            hvd.allreduce(torch.ones(4, 4).t())


@pytest.mark.parametrize("size", [1, 3])
def test_defaults_and_scaling(size: int) -> None:
    run_ranks(_defaults_and_scaling, size)


def _grouped_allreduce(rank: int, size: int) -> None:
    with horovod() as hvd:
        shapes = [(4,), (3, 2), (0,), (5000,)]
        dtypes = [torch.float32, torch.float64, torch.float32, torch.int64]
        everyones = [[_tensor(r, s, d) for s, d in zip(shapes, dtypes, strict=True)] for r in range(size)]
        expected = [_reference(list(t), hvd.Sum) for t in zip(*everyones, strict=True)]
        mine = everyones[rank]
        for found, wanted in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True):
            _close(found, wanted)
        outputs = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="g"))
        assert isinstance(outputs, tuple)
        assert [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)] == [True] * 4
        in_place = [tensor.clone() for tensor in mine]
        returned = hvd.grouped_allreduce_(in_place, op=hvd.Sum)
        assert all(a is b for a, b in zip(returned, in_place, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(in_place, expected, strict=True))
        with pytest.raises(ValueError, match="at least one"):
            hvd.grouped_allreduce([])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_grouped_allreduce(size: int) -> None:
    run_ranks(_grouped_allreduce, size)


def _allgather(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in MOVED:
            for tail in ((), (3,), (2, 2)):
                for rows in ([2] * size, list(range(size)), [40000] * size):
                    with cases(f"{dtype} {tail} {rows}"):
                        tensors = [_tensor(r, (rows[r], *tail), dtype) for r in range(size)]
                        expected = torch.cat(tensors)
                        assert torch.equal(hvd.allgather(tensors[rank]), expected)
                        both = hvd.grouped_allgather([tensors[rank], tensors[rank] + tensors[rank]])
                        assert torch.equal(both[0], expected)
                        assert torch.equal(both[1], expected + expected)
                        handle = hvd.allgather_async(tensors[rank], name="a")
                        assert torch.equal(hvd.synchronize(handle), expected)
        cases.check()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allgather(size: int) -> None:
    run_ranks(_allgather, size, timeout=120)


def _broadcast(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in MOVED:
            for shape in SHAPES:
                for root in range(size):
                    with cases(f"{dtype} {shape} {root}"):
                        mine, expected = _tensor(rank, shape, dtype), _tensor(root, shape, dtype)
                        assert torch.equal(hvd.broadcast(mine, root), expected)
                        assert torch.equal(mine, _tensor(rank, shape, dtype))
                        assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
                        assert hvd.broadcast_(mine, root) is mine
                        assert torch.equal(mine, expected)
        cases.check()
        with pytest.raises(ValueError):
            hvd.broadcast(torch.ones(2), size)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast(size: int) -> None:
    run_ranks(_broadcast, size, timeout=120)


def _integer_average(rank: int, size: int) -> None:
    with horovod() as hvd:
        base = torch.tensor([-3, -1, 0, 1, 3, 7])
        for dtype in (torch.int32, torch.int64):
            for prescale, postscale in ((1.0, 2.0), (1.0, 4.0), (0.5, 2.0), (1.0, 0.5), (1.0, 1.0)):
                # Horovod divides and scales the sum at once, and cuts off once.
                total = sum(((base + r) * prescale).to(dtype) for r in range(size))
                expected = (total * (postscale / size)).to(dtype)
                factors = {"op": hvd.Average, "prescale_factor": prescale, "postscale_factor": postscale}
                x = (base + rank).to(dtype)
                assert torch.equal(hvd.allreduce(x, **factors), expected)
                for reduced in hvd.grouped_allreduce([x, x.clone()], **factors):
                    assert torch.equal(reduced, expected)
                rows = expected.tensor_split(size)[rank]
                assert torch.equal(hvd.reducescatter(x, **factors), rows)


@pytest.mark.parametrize("size", [2, 3])
def test_average_of_integers_with_factors(size: int) -> None:
    run_ranks(_integer_average, size)


def _alltoall(rank: int, size: int) -> None:
    with horovod() as hvd:
        for dtype in MOVED:
            for tail in ((), (3,)):
                rows = [[(r + s) % 3 for s in range(size)] for r in range(size)]
                tensors = [_tensor(r, (sum(rows[r]), *tail), dtype) for r in range(size)]
                expected = torch.cat([tensors[r].split(rows[r])[rank] for r in range(size)])
                for splits in (rows[rank], torch.tensor(rows[rank], dtype=torch.int32)):
                    output, received = hvd.alltoall(tensors[rank], splits=splits)
                    assert torch.equal(output, expected)
                    assert received.tolist() == [rows[r][rank] for r in range(size)]
                    assert received.dtype == torch.int32
        even = torch.arange(size * 2) + 100 * rank
        expected = torch.cat([torch.arange(2) + 2 * rank + 100 * r for r in range(size)])
        assert torch.equal(hvd.alltoall(even), expected)
        output, received = hvd.synchronize(hvd.alltoall_async(even, name="a"))
        assert torch.equal(output, expected) and received.tolist() == [2] * size
        overflowing = [2**63 - 1, 2**63 - 1, 2 * size + 2, *[0] * (size - 3)]
        for splits in ([1] * (size + 1), [-1] * size, [3] * size, overflowing):
            with pytest.raises(ValueError):
                hvd.alltoall(even, splits=splits)
        if size > 1:
            with pytest.raises(ValueError):
                hvd.alltoall(torch.ones(size * 2 + 1))
        # Rows that are left over go to nobody.
        source = torch.arange(size + 3.0, requires_grad=True)
        for count in (1, 0):
            output, received = hvd.alltoall(source, splits=[count] * size)
            assert torch.equal(output, torch.full((count * size,), float(rank)))
            assert received.tolist() == [count] * size
            (gradient,) = torch.autograd.grad(2 * output.sum(), source)
            assert torch.equal(gradient, torch.tensor([2.0 * count] * size + [0.0] * 3))
        hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_alltoall(size: int) -> None:
    run_ranks(_alltoall, size)


def _reducescatter(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for dtype in REDUCED:
            for shape in ((size * 2,), (size * 2 + 1, 3), (1, 4), (0,), (30000, 2)):
                for op in (hvd.Average, hvd.Sum):
                    with cases(f"{dtype} {shape} {op}"):
                        tensors = [_tensor(r, shape, dtype) for r in range(size)]
                        each, more = divmod(shape[0], size)
                        start = rank * each + min(rank, more)
                        expected = _reference(tensors, op)[start : start + each + (rank < more)]
                        _close(hvd.reducescatter(tensors[rank], op=op), expected)
                        grouped = hvd.grouped_reducescatter([tensors[rank]] * 2, op=op)
                        assert isinstance(grouped, list)
                        for found in grouped:
                            _close(found, expected)
        cases.check()
        x = torch.ones(size * 2)
        scaled = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert scaled.tolist() == [size / 2] * 2
        with pytest.raises(ValueError):
            hvd.reducescatter(x, op=hvd.Max)
        with pytest.raises(NotImplementedError):
            hvd.reducescatter(x, op=hvd.Adasum)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reducescatter(size: int) -> None:
    run_ranks(_reducescatter, size, timeout=120)


def _any_order(rank: int, size: int) -> None:
    with horovod() as hvd:
        order = torch.randperm(300, generator=torch.Generator().manual_seed(rank)).tolist()
        handles = {i: hvd.allreduce_async(torch.full((i % 7 + 1,), float(i)), op=hvd.Sum, name=f"t{i}") for i in order}
        for i in range(300):
            assert hvd.synchronize(handles[i]).tolist() == [i * size] * (i % 7 + 1)
        # A barrier overtakes.
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="late")
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="late")
        assert hvd.synchronize(handle).tolist() == [size] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_any_order(size: int) -> None:
    run_ranks(_any_order, size)


def _handles(rank: int, size: int) -> None:
    with horovod() as hvd:
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(3), name="h")
            assert not hvd.poll(handle), "nobody else has called it"
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(3), name="h")
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle).tolist() == [1] * 3
        assert hvd.synchronize(handle) is None, "as in Horovod"
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)


def test_handles() -> None:
    run_ranks(_handles, 2)
