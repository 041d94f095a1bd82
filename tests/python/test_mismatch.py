"""Ranks that disagree: an error on every rank, soon, that says which rank sent what; then the group goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, on_gloo, run_ranks
from operations import KINDS, outcome, start

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo: mismatches hang or give wrong results")

LIMIT_S = 2.0
"""After the last rank arrived."""
COUNTS = {"small": 3, "large": (1 << 20) // 4}
"""Elements of float32: the large ones are 1 MiB."""


def _hundred_correct(rank: int, world_size: int, times: int = 100) -> None:
    for step in range(times):
        tensor = torch.full((1 + (step % 3) * 5000,), float(rank + step))
        dist.all_reduce(tensor)
        assert (tensor == sum(range(world_size)) + world_size * step).all(), (
            f"all_reduce {step} after a mismatch is wrong"
        )


def _mention(message: str, words: list[str]) -> None:
    normalized = message.lower().replace("_", "").replace("-", "").replace(" ", "")
    missing = [w for w in words if w.lower().replace("_", "").replace("-", "").replace(" ", "") not in normalized]
    assert not missing, f"the message lacks {missing}: {message}"


KIND_WORDS = {
    "all_gather_into_tensor": ["all_gather"],
    "reduce_scatter_tensor": ["reduce_scatter"],
    "all_to_all_single": ["all_to_all"],
}


def _pairs(rank: int, world_size: int, size: str, synchronous: bool) -> None:
    cases = Cases()
    count = COUNTS[size]
    for kinds in combinations(KINDS, 2):
        for order in (kinds, kinds[::-1]):
            with cases(f"{order[0]} against {order[1]}, {size}, {'sync' if synchronous else 'async'}"):
                kind = order[min(rank, 1)]
                message = expect_error(
                    lambda: _run(kind, rank, world_size, count, synchronous),  # noqa: B023
                    within_s=LIMIT_S,
                )
                words = [w for k in order for w in KIND_WORDS.get(k, [k])]
                _mention(message, ["rank 0", "rank 1", *words])
                _hundred_correct(rank, world_size, 3)
    cases.check()
    _hundred_correct(rank, world_size)


def _run(kind: str, rank: int, world_size: int, count: int, synchronous: bool) -> None:
    if not synchronous:
        work, _, _ = start(kind, rank, world_size, count)
        work.wait()
        return
    mine, flat = torch.ones(count), torch.ones(world_size * count)
    lists, others = [torch.ones(count) for _ in range(world_size)], [torch.ones(count) for _ in range(world_size)]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(mine),
        "broadcast": lambda: dist.broadcast(mine, 0),
        "reduce": lambda: dist.reduce(mine, 0),
        "all_gather": lambda: dist.all_gather(lists, mine),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(flat, mine),
        "gather": lambda: dist.gather(mine, lists if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(mine, lists if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(mine, lists),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(mine, flat),
        "all_to_all": lambda: dist.all_to_all(lists, others),
        "all_to_all_single": lambda: dist.all_to_all_single(flat.clone(), flat),
        "barrier": dist.barrier,
    }
    calls[kind]()


@pytest.mark.parametrize("synchronous", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_pair_of_kinds(size: str, synchronous: bool) -> None:
    run_ranks(_pairs, 2, size, synchronous, timeout=120)


def _pairs_of_three(rank: int, world_size: int) -> None:
    cases = Cases()
    for other in KINDS[1:]:
        for odd in range(world_size):
            with cases(f"all_reduce, but rank {odd} {other}"):
                kind = other if rank == odd else "all_reduce"
                message = expect_error(lambda: _run(kind, rank, world_size, 10, True), within_s=LIMIT_S)  # noqa: B023
                _mention(message, [f"rank {odd}", *KIND_WORDS.get(other, [other]), "all_reduce"])
                _hundred_correct(rank, world_size, 3)
    cases.check()
    _hundred_correct(rank, world_size)


def test_one_of_three_ranks_calls_something_else() -> None:
    run_ranks(_pairs_of_three, 3, timeout=120)


def _arguments(rank: int, world_size: int, size: str) -> None:
    count = COUNTS[size]
    first = rank == 0
    other = count + 1 if first else count
    f32 = torch.float32
    variants: dict[str, tuple[Callable[[], object], list[str]]] = {
        "all_reduce dtype": (
            lambda: dist.all_reduce(torch.ones(count, dtype=f32 if first else torch.float64)),
            ["float32", "float64"],
        ),
        "all_reduce dtype of one size": (
            lambda: dist.all_reduce(torch.ones(count, dtype=f32 if first else torch.int32)),
            ["float32", "int32"],
        ),
        "all_reduce count": (lambda: dist.all_reduce(torch.ones(other)), [str(count), str(count + 1)]),
        "all_reduce count of zero": (lambda: dist.all_reduce(torch.ones(0 if first else count)), [str(count)]),
        "all_reduce op": (
            lambda: dist.all_reduce(torch.ones(count), dist.ReduceOp.SUM if first else dist.ReduceOp.MAX),
            ["sum", "max"],
        ),
        "reduce root": (lambda: dist.reduce(torch.ones(count), rank), ["root"]),
        "reduce op": (
            lambda: dist.reduce(torch.ones(count), 0, dist.ReduceOp.MIN if first else dist.ReduceOp.SUM),
            ["min"],
        ),
        "broadcast root": (lambda: dist.broadcast(torch.ones(count), rank), ["root"]),
        "broadcast count": (lambda: dist.broadcast(torch.ones(other), 0), [str(count), str(count + 1)]),
        "broadcast dtype": (
            lambda: dist.broadcast(torch.ones(count, dtype=torch.int64 if first else torch.int32), 0),
            ["int64", "int32"],
        ),
        "all_gather_into_tensor count": (
            lambda: dist.all_gather_into_tensor(torch.ones(2 * other), torch.ones(other)),
            [str(count), str(count + 1)],
        ),
        "all_gather dtype": (
            lambda: dist.all_gather([_typed(first, count), _typed(first, count)], _typed(first, count)),
            ["float32", "int32"],
        ),
        "reduce_scatter_tensor count": (
            lambda: dist.reduce_scatter_tensor(torch.ones(other), torch.ones(2 * other)),
            [],
        ),
        "gather root": (lambda: dist.gather(torch.ones(count), [torch.ones(count), torch.ones(count)], rank), ["root"]),
        "scatter root": (lambda: dist.scatter(torch.ones(count), [torch.ones(count)] * 2, rank), ["root"]),
        "all_to_all_single count": (lambda: dist.all_to_all_single(torch.ones(2 * other), torch.ones(2 * other)), []),
    }
    cases = Cases()
    for name, (call, words) in variants.items():
        with cases(f"{name}, {size}"):
            _mention(expect_error(call, within_s=LIMIT_S), ["rank 0", "rank 1", *words])
            _hundred_correct(rank, world_size)
    cases.check()


def _typed(first: bool, count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32 if first else torch.int32)


@pytest.mark.parametrize("size", ["small", "large"])
def test_arguments_that_differ(size: str) -> None:
    run_ranks(_arguments, 2, size, timeout=120)


def _buffers(rank: int, world_size: int) -> None:
    for count in COUNTS.values():
        tensor = torch.full((count,), 7.0, dtype=torch.float32 if rank == 0 else torch.float64)
        expect_error(lambda: dist.all_reduce(tensor))  # noqa: B023
        assert (tensor == 7.0).all(), "a tensor was written by an operation that failed its checks"


def test_tensors_are_not_written() -> None:
    run_ranks(_buffers, 2)


def _late(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(1.0)
    expect_error(lambda: dist.all_reduce(torch.ones(3 + rank)), "rank 0", "rank 1", within_s=LIMIT_S)
    _hundred_correct(rank, world_size)


def test_last_rank_arrives_late() -> None:
    run_ranks(_late, 3)


def _in_flight(rank: int, world_size: int) -> None:
    # Ten operations in flight; the fifth differs. It fails, and it alone.
    tensors = [torch.full((100 + (rank if i == 5 else 0),), float(rank)) for i in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        if index == 5:
            expect_error(work.wait, "rank 0", "rank 1")
            assert not work.is_success() and outcome(work) is not None
            expect_error(work.get_future().wait, "rank 1")
        else:
            work.wait()
            assert (tensor == 1.0).all(), f"operation {index}"
    _hundred_correct(rank, world_size)


def test_a_mismatch_fails_exactly_one_operation() -> None:
    run_ranks(_in_flight, 2)
