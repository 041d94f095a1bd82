"""Tensors in the arena: collectives on them, mixed with ordinary ones; that they behave as ordinary tensors elsewhere;
memory, fork, death of a peer."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
import time
from datetime import timedelta

import horon
import pytest
import torch
import torch.distributed as dist
from harness import Cases, assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks, store
from reference import DTYPES, OPS, all_inputs, as_bytes, check_equal, check_reduced, make_input, reduce_op, supported

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

# Inline, a little more, odd, several blocks and slices.
SIZES = [1, 1000, 4099, 65537, 300000]


def _in_arena(tensor: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """A copy in the arena, `skip` elements behind the beginning of its block."""
    copied = horon.empty(tensor.numel() + skip, dtype=tensor.dtype)[skip:].view(tensor.shape)
    return copied.copy_(tensor)


def _reductions(rank: int, world_size: int, ops: list[str], dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for op in ops:
        for dtype in dtypes:
            if not supported(op, dtype):
                continue
            for count in SIZES:
                inputs = all_inputs(world_size, count, dtype)
                with cases(f"all_reduce {op} {dtype} n={count}"):
                    ordinary, tensor = inputs[rank].clone(), _in_arena(inputs[rank], skip=rank * 3)
                    assert horon.is_in_arena(tensor)
                    dist.all_reduce(ordinary, reduce_op(op))
                    dist.all_reduce(tensor, reduce_op(op))
                    check_reduced(tensor, inputs, op)
                    assert torch.equal(as_bytes(tensor), as_bytes(ordinary)), "other bits than outside the arena"
                with cases(f"reduce {op} {dtype} n={count}"):
                    tensor = _in_arena(inputs[rank])
                    dist.reduce(tensor, world_size - 1, reduce_op(op))
                    if rank == world_size - 1:
                        check_reduced(tensor, inputs, op)
                    else:
                        check_equal(tensor, inputs[rank])
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_sum_and_average_of_every_dtype(world_size: int) -> None:
    run_ranks(_reductions, world_size, ["SUM", "AVG"], DTYPES, timeout=120)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_operation(world_size: int) -> None:
    run_ranks(_reductions, world_size, OPS, [torch.float32, torch.bfloat16, torch.int64], timeout=120)


def _mixed(rank: int, world_size: int) -> None:
    cases = Cases()
    for count in SIZES:
        inputs = all_inputs(world_size, count, torch.float32)
        for mask in range(1 << world_size):
            with cases(f"n={count} mask={mask:b}"):
                tensor = _in_arena(inputs[rank]) if mask >> rank & 1 else inputs[rank].clone()
                dist.all_reduce(tensor)
                check_reduced(tensor, inputs, "SUM")
    cases.check()


def test_only_some_ranks_use_the_arena() -> None:
    run_ranks(_mixed, 3)


def _movements(rank: int, n: int) -> None:
    cases = Cases()
    for dtype in (torch.float32, torch.bool, torch.complex128):
        for count in SIZES:
            inputs = all_inputs(n, count, dtype)
            mine = _in_arena(inputs[rank], skip=rank)
            with cases(f"broadcast {dtype} n={count}"):
                for root in range(n):
                    tensor = _in_arena(inputs[rank]) if rank == root or count % 2 else inputs[rank].clone()
                    dist.broadcast(tensor, root)
                    check_equal(tensor, inputs[root])
            with cases(f"all_gather_into_tensor {dtype} n={count}"):
                output = (horon.empty if count % 2 else torch.empty)(n * count, dtype=dtype)
                dist.all_gather_into_tensor(output, mine)
                check_equal(output, torch.cat(inputs))
            with cases(f"all_gather_into_tensor in place {dtype} n={count}"):
                output = horon.empty(n * count, dtype=dtype)
                own = output[rank * count : (rank + 1) * count].copy_(inputs[rank])
                dist.all_gather_into_tensor(output, own)
                check_equal(output, torch.cat(inputs))
            with cases(f"all_gather {dtype} n={count}"):
                outputs = [torch.empty(count, dtype=dtype) for _ in range(n)]
                dist.all_gather(outputs, mine)
                check_equal(torch.cat(outputs), torch.cat(inputs))
            with cases(f"gather, scatter {dtype} n={count}"):
                outputs = [horon.empty(count, dtype=dtype) for _ in range(n)]
                dist.gather(mine, outputs if rank == 0 else None, 0)
                if rank == 0:
                    check_equal(torch.cat(outputs), torch.cat(inputs))
                tensor = horon.empty(count, dtype=dtype)
                dist.scatter(tensor, outputs if rank == 0 else None, 0)
                check_equal(tensor, inputs[rank])
            with cases(f"all_to_all_single {dtype} n={count}"):
                whole = _in_arena(torch.cat([make_input(rank, count, dtype, seed=r) for r in range(n)]))
                output = horon.empty(n * count, dtype=dtype)
                dist.all_to_all_single(output, whole)
                check_equal(output, torch.cat([make_input(r, count, dtype, seed=rank) for r in range(n)]))
            if dtype != torch.bool:
                with cases(f"reduce_scatter_tensor {dtype} n={count}"):
                    whole = _in_arena(torch.cat([make_input(rank, count, dtype, seed=r) for r in range(n)]))
                    output = torch.empty(count, dtype=dtype)
                    dist.reduce_scatter_tensor(output, whole)
                    check_reduced(output, all_inputs(n, count, dtype, seed=rank), "SUM")
                    own = whole[rank * count : (rank + 1) * count]
                    dist.reduce_scatter_tensor(own, whole)  # in place
                    check_reduced(own, all_inputs(n, count, dtype, seed=rank), "SUM")
                with cases(f"reduce_scatter_tensor over another rank's part {dtype} n={count}"):
                    whole = _in_arena(torch.cat([make_input(rank, count, dtype, seed=r) for r in range(n)]))
                    first = whole[:count]  # which rank 0 reads
                    dist.reduce_scatter_tensor(first, whole)
                    check_reduced(first, all_inputs(n, count, dtype, seed=rank), "SUM")
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_that_move(world_size: int) -> None:
    run_ranks(_movements, world_size, timeout=120)


def _views(rank: int, world_size: int) -> None:
    inputs = all_inputs(world_size, 301 * 401, torch.float32)
    mine = inputs[rank].view(301, 401)
    base = horon.empty(301, 402)
    base.fill_(-9)
    base[:, :401] = mine
    view = base[:, :401]
    assert not view.is_contiguous() and horon.is_in_arena(view)
    dist.all_reduce(view)  # through a contiguous copy
    check_reduced(view.contiguous().view(-1), inputs, "SUM")
    assert (base[:, 401] == -9).all()
    base = horon.zeros(3, 301, 401)
    base[1] = mine
    dist.all_reduce(base[1])
    check_reduced(base[1].reshape(-1), inputs, "SUM")
    assert not base[0].any() and not base[2].any()
    coalesced = [_in_arena(make_input(rank, n, torch.float32, seed)) for seed, n in enumerate((5, 70001, 0, 3000))]
    dist.all_reduce_coalesced(coalesced)
    for seed, tensor in enumerate(coalesced):
        check_reduced(tensor, all_inputs(world_size, tensor.numel(), torch.float32, seed), "SUM")
    works = [dist.all_reduce(_in_arena(torch.ones(9999)), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
        assert (work.result()[0] == world_size).all()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_views_coalesced_and_asynchronous() -> None:
    run_ranks(_views, 3)


def _different_offsets(rank: int, world_size: int) -> None:
    held = [horon.empty(1000 * (rank + 1) + 17) for _ in range(rank * 3)]
    for step in range(200):
        tensor = horon.empty(5000 + step, dtype=torch.float32)
        tensor.fill_(rank + step)
        dist.all_reduce(tensor)
        expected = float(sum(range(world_size)) + world_size * step)
        assert (tensor == expected).all(), f"step {step}"
        if step % (rank + 2) == 0:
            held.append(tensor)
    del held


def test_ranks_allocate_independently() -> None:
    run_ranks(_different_offsets, 4)


def _two_groups(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    pair = dist.new_group([0, 1])
    tensor = horon.empty(100_000)
    for group in groups:
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(range(1, world_size + 1))).all()
    with open("/proc/self/maps") as maps:
        arenas = [line for line in maps if "memfd:horon" in line and _length(line) >= 1 << 30]
    assert len(arenas) == world_size, arenas  # one for each rank, whatever the number of groups
    if rank < 2:
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, group=pair)
        assert (tensor == 3).all()
        dist.destroy_process_group(pair)
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    assert (tensor == world_size).all()


def _length(line: str) -> int:
    begin, end = line.split()[0].split("-")
    return int(end, 16) - int(begin, 16)


def test_groups_share_one_mapping_per_peer() -> None:
    assert_clean_exits(run_fresh_processes(_two_groups, 3, env={"HORON_ARENA_BYTES": str(1 << 30)}))


def _bounded(rank: int, world_size: int) -> None:
    dist.all_reduce(horon.zeros(10))
    gc.collect()
    before = horon.arena_statistics()
    for step in range(300):
        tensor = horon.empty(1 << 20)  # 4 MiB: 1.2 GiB in all
        tensor[0] = tensor[-1] = step
        dist.all_reduce(tensor)
    del tensor
    after = horon.arena_statistics()
    assert after["used_bytes"] == before["used_bytes"], (before, after)
    assert after["reserved_bytes"] <= before["reserved_bytes"] + (16 << 20), (before, after)
    # Growth: far more than what is there, and back.
    many = [horon.zeros(4 << 20) for _ in range(40)]  # 640 MiB
    assert horon.arena_statistics()["reserved_bytes"] >= 640 << 20
    dist.all_reduce(many[-1])
    del many
    assert horon.arena_statistics()["reserved_bytes"] <= (256 << 20) + before["used_bytes"] + (4 << 20)


def test_memory_is_used_again_and_given_back() -> None:
    run_ranks(_bounded, 2)


def _budget(rank: int, world_size: int) -> None:
    kept = horon.empty(3 << 20, dtype=torch.uint8)
    message = expect_error(lambda: horon.empty(3 << 20, dtype=torch.uint8), "OutOfMemoryError")
    assert "HORON_ARENA_BYTES" in message, message
    dist.all_reduce(kept)
    del kept
    horon.empty(4 << 20, dtype=torch.uint8)
    message = expect_error(lambda: horon.empty(1 << 45, dtype=torch.uint8), "OutOfMemoryError")
    dist.destroy_process_group()


def test_a_spent_budget_is_an_error() -> None:
    assert_clean_exits(run_fresh_processes(_budget, 2, env={"HORON_ARENA_BYTES": str(4 << 20)}))


def _off(rank: int, world_size: int) -> None:
    if rank == 0 or world_size == 2:
        message = expect_error(lambda: horon.empty(3), "ValueError")
        assert "HORON_ARENA_BYTES" in message, message
        tensor = torch.ones(70001)
    else:
        tensor = horon.zeros(70001) + 1
    dist.all_reduce(tensor)
    assert (tensor == world_size).all()
    assert not horon.is_in_arena(torch.ones(3))
    dist.destroy_process_group()


def test_the_arena_can_be_off() -> None:
    assert_clean_exits(run_fresh_processes(_off, 2, env={"HORON_ARENA_BYTES": "0"}))


def _nonsense(rank: int, world_size: int) -> None:
    expect_error(lambda: horon.empty(3), "ValueError", "HORON_ARENA_BYTES")


def test_a_size_that_makes_no_sense() -> None:
    assert_clean_exits(run_fresh_processes(_nonsense, 1, init=False, env={"HORON_ARENA_BYTES": "much"}))


def _without_a_group() -> None:
    tensor = horon.empty(2, 3, dtype=torch.int16)
    assert tensor.shape == (2, 3) and tensor.dtype == torch.int16 and tensor.is_contiguous()
    assert horon.is_in_arena(tensor) and horon.is_in_arena(tensor[1, 1:]) and not horon.is_in_arena(torch.ones(3))
    assert horon.empty((2, 3)).shape == horon.empty(torch.Size([2, 3])).shape == horon.empty([2, 3]).shape == (2, 3)
    assert horon.empty().shape == () and horon.empty(0).shape == (0,) and horon.empty(2, 0).numel() == 0
    assert horon.empty(1).dtype == torch.get_default_dtype()
    assert horon.empty(3, requires_grad=True).requires_grad and not horon.empty(3).requires_grad
    assert horon.zeros(1000, requires_grad=True).requires_grad and not horon.zeros(1000).any()
    for bad in (-1, "3", 2.5):
        with pytest.raises((RuntimeError, TypeError)):
            horon.empty(bad)  # type: ignore[arg-type]
    like = torch.randn(4, 5, 6).permute(2, 0, 1)
    for result in (horon.empty_like(like), horon.empty_like(like, dtype=torch.float64)):
        expected = torch.empty_like(like, dtype=result.dtype)
        assert result.stride() == expected.stride() and result.shape == expected.shape and horon.is_in_arena(result)
    assert horon.empty_like(torch.ones(3), requires_grad=True).requires_grad
    assert horon.empty_like(like.expand(3, 6, 4, 5)).stride() == torch.empty_like(like.expand(3, 6, 4, 5)).stride()


def _as_ordinary(rank: int, world_size: int) -> None:
    _without_a_group()
    values = torch.arange(1000.0)
    tensor = _in_arena(values)
    for made in (tensor.clone(), tensor + 1, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert not horon.is_in_arena(made)
    assert torch.equal(copy.deepcopy(tensor), values) and torch.equal(pickle.loads(pickle.dumps(tensor)), values)
    file = io.BytesIO()
    torch.save({"t": tensor, "view": tensor[10:20]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["view"], values[10:20]) and not horon.is_in_arena(loaded["t"])
    array = tensor.numpy()
    array[3] = -1
    assert tensor[3] == -1
    # Growing and shrinking stays in the arena.
    tensor = _in_arena(values)
    tensor.resize_(5000)
    assert horon.is_in_arena(tensor) and torch.equal(tensor[:1000], values)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert not horon.is_in_arena(tensor)
    storage.resize_(20000)
    assert horon.is_in_arena(tensor)
    dist.all_reduce(tensor.fill_(1.0))
    assert (tensor == world_size).all()
    # Sharing with torch's own means leaves it.
    tensor = _in_arena(values)
    view = tensor[5:]
    tensor.share_memory_()
    assert tensor.is_shared() and not horon.is_in_arena(tensor) and not horon.is_in_arena(view)
    assert torch.equal(tensor, values) and torch.equal(view, values[5:])
    dist.all_reduce(tensor)
    assert torch.equal(tensor, values * world_size)
    # Autograd.
    weight = horon.empty(70001, requires_grad=True)
    with torch.no_grad():
        weight.fill_(2.0)
    (weight * weight).sum().backward()
    assert weight.grad is not None and (weight.grad == 4).all()
    # The memory lives as long as the last view.
    gc.collect()
    used = horon.arena_statistics()["used_bytes"]
    view = horon.empty(1 << 20)[7:9]
    assert horon.arena_statistics()["used_bytes"] > used
    del view
    assert horon.arena_statistics()["used_bytes"] == used


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_otherwise_they_are_ordinary_tensors() -> None:
    run_ranks(_as_ordinary, 2)


def _forked(rank: int, world_size: int) -> None:
    tensor = horon.empty(70001).fill_(rank + 1.0)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert (tensor == 3).all()
            tensor.fill_(-1.0)
            assert (tensor == -1).all()
            assert "fork" in expect_error(lambda: dist.all_reduce(tensor))
            own = horon.empty(100).fill_(7.0)  # of an arena of its own
            del tensor, own
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (tensor == 3).all(), "the child's writes have reached the parent"
    dist.all_reduce(tensor)
    assert (tensor == 6).all()
    dist.destroy_process_group()


def test_a_forked_child_reads_and_disturbs_nobody() -> None:
    assert_clean_exits(run_fresh_processes(_forked, 2))


def _killed(rank: int, world_size: int) -> None:
    tensors = [horon.zeros(8 << 20)]
    dist.all_reduce(tensors[0])
    if rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def work_until_it_fails() -> None:
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up:
            dist.all_reduce(tensors[0], dist.ReduceOp.MAX)

    message = expect_error(work_until_it_fails)
    assert "rank 1" in message, message
    lost = horon.arena_statistics()["quarantined_bytes"]
    assert lost >= tensors[0].nbytes
    tensors.clear()
    assert horon.arena_statistics()["used_bytes"] >= lost
    again = horon.zeros(8 << 20)  # from elsewhere
    assert not again.any()
    dist.destroy_process_group()


def test_a_peer_killed_in_the_middle() -> None:
    assert_clean_exits(run_fresh_processes(_killed, 2, timeout=30), [0, -signal.SIGKILL])


def _late(rank: int, world_size: int) -> None:
    tensor = horon.zeros(70001)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        message = expect_error(lambda: dist.all_reduce(tensor, group=group))
        assert "Timed out" in message, message
        assert horon.arena_statistics()["quarantined_bytes"] >= tensor.nbytes
        store().set("done", "1")
    store().wait(["done"])
    dist.destroy_process_group()


def test_a_timeout_quarantines() -> None:
    assert_clean_exits(run_fresh_processes(_late, 2))


def _mismatch(rank: int, world_size: int) -> None:
    tensor = horon.empty(70001 + rank).fill_(5.0)
    expect_error(lambda: dist.all_reduce(tensor))
    assert (tensor == 5).all()
    assert horon.arena_statistics()["quarantined_bytes"] == 0
    tensor = horon.empty(70001).fill_(5.0)
    dist.all_reduce(tensor)
    assert (tensor == 5 * world_size).all()


def test_a_mismatch_costs_nothing() -> None:
    assert_clean_exits(run_fresh_processes(_mismatch, 2))
