"""Asynchronous operations: works, futures, finite waits, callbacks, many in flight."""

from __future__ import annotations

import random
import resource
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, gloo_lacks, on_gloo, run_fresh_processes, run_ranks, store
from operations import KINDS, outcome, start


def _every_kind(rank: int, world_size: int, kind: str) -> None:
    for count in (1, 1000, 300000):
        if rank != 0:
            time.sleep(0.02)
        work, outputs, values = start(kind, rank, world_size, count)
        assert isinstance(work, dist.Work)
        work.wait()
        assert on_gloo() or (work.is_completed() and work.is_success() and outcome(work) is None)
        for output, value in zip(outputs, values, strict=False):
            assert (output == value).all(), f"{kind} n={count}: {output[0].item()}, not {value}"
        work.wait()  # Again: allowed, and at once.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective(kind: str, world_size: int) -> None:
    run_ranks(_every_kind, world_size, kind)


def _not_before_the_others(rank: int, world_size: int, count: int) -> None:
    if rank == 0:
        work, outputs, values = start("all_reduce", rank, world_size, count)
        time.sleep(0.1)
        assert not work.is_completed(), "completed before the other rank came"
        store().set("go", "1")
        deadline = time.monotonic() + 30
        while not work.is_completed():  # Polling alone must make progress.
            assert time.monotonic() < deadline, "never completed by polling"
            time.sleep(0.001)
        assert (outputs[0] == values[0]).all()
    else:
        store().wait(["go"])
        work, outputs, values = start("all_reduce", rank, world_size, count)
    work.wait()


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_is_completed(count: int) -> None:
    run_ranks(_not_before_the_others, 2, count)


def _finite_wait(rank: int, world_size: int, count: int) -> None:
    if rank == 0:
        work, outputs, values = start("all_reduce", rank, world_size, count)
        start_s = time.monotonic()
        expect_error(lambda: work.wait(timedelta(milliseconds=300)))
        took_s = time.monotonic() - start_s
        assert 0.2 < took_s < 10, f"a wait of 0.3 s took {took_s:.1f} s"
        assert not work.is_completed(), "an expired wait must leave the operation running"
        store().set("go", "1")
        work.wait()
        assert (outputs[0] == values[0]).all()
    else:
        store().wait(["go"])
        work, outputs, values = start("all_reduce", rank, world_size, count)
        work.wait(timedelta(seconds=20))
    dist.barrier()


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_wait_that_expires_leaves_the_operation_running(count: int) -> None:
    gloo_lacks("an expired wait breaks the group")
    run_ranks(_finite_wait, 2, count)


def _futures(rank: int, world_size: int, kind: str) -> None:
    for count in (1, 300000):
        work, outputs, values = start(kind, rank, world_size, count)
        done = threading.Event()
        future = work.get_future()
        chained = future.then(lambda f: (done.set(), len(f.value()) if f.value() is not None else None)[1])  # noqa: B023
        length = chained.wait()
        assert done.is_set()
        value = future.value()
        if kind != "barrier":
            assert isinstance(value, list) and all(isinstance(t, torch.Tensor) for t in value), (
                f"the value is {type(value)}"
            )
            assert length == len(value)
        if kind in ("all_reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor"):
            assert value[0].data_ptr() == outputs[0].data_ptr(), "the future's tensor is not the output"
        for output, expected in zip(outputs, values, strict=False):
            assert (output == expected).all()
        late = work.get_future().then(lambda _: 7)
        assert late.wait() == 7
        work.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_future_of_every_collective(kind: str) -> None:
    if kind.startswith("reduce_scatter"):
        gloo_lacks("no future for reduce_scatter")
    run_ranks(_futures, 2, kind)


def _result(rank: int, world_size: int) -> None:
    work, outputs, _ = start("all_reduce", rank, world_size, 10)
    work.wait()
    result = work.result()
    assert [t.data_ptr() for t in result] == [outputs[0].data_ptr()]
    assert torch.equal(result[0], torch.ones(10))


def test_result() -> None:
    run_ranks(_result, 2)


def _reverse(rank: int, world_size: int) -> None:
    sizes = [1, 100, 70001]
    started = [(step, *start("all_reduce", rank, world_size, sizes[step % 3])) for step in range(500)]
    for step, work, outputs, values in reversed(started):
        work.wait()
        assert (outputs[0] == values[0]).all(), f"operation {step}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_in_flight_waited_in_reverse(world_size: int) -> None:
    run_ranks(_reverse, world_size, timeout=120)


def _mixed_kinds_in_flight(rank: int, world_size: int) -> None:
    started = [(kind, *start(kind, rank, world_size, 100 + step)) for step in range(20) for kind in KINDS]
    for kind, work, outputs, values in reversed(started):
        work.wait()
        for output, value in zip(outputs, values, strict=False):
            assert (output == value).all(), kind


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_kinds_in_flight_together(world_size: int) -> None:
    run_ranks(_mixed_kinds_in_flight, world_size)


def _never_waited(rank: int, world_size: int) -> None:
    tensors = []
    for step in range(100):
        _, outputs, _ = start("all_reduce", rank, world_size, 1 + 1000 * (step % 5))
        tensors.append(outputs[0])
    dist.barrier()  # In the order of issue: it completes after all of them.
    if not on_gloo():
        assert all((t == sum(range(world_size))).all() for t in tensors)
    for _ in range(20):
        start("all_reduce", rank, world_size, 70001)
    # destroy_process_group drains them.


@pytest.mark.parametrize("world_size", [2, 3])
def test_works_that_are_never_waited(world_size: int) -> None:
    run_ranks(_never_waited, world_size)


def _callback_waits(rank: int, world_size: int) -> None:
    second = torch.full((1000,), float(rank))
    order: list[str] = []

    def then(future: torch.futures.Future) -> torch.Tensor:
        # As PowerSGD's hook does: a new collective, issued and waited for on the thread that runs callbacks.
        work = dist.all_reduce(second, async_op=True)
        work.wait()
        order.append("inner")
        return future.value()[0] + second

    for count in (1000, 1000, 1000):
        first = torch.full((count,), float(rank))
        second.fill_(float(rank))
        chained = dist.all_reduce(first, async_op=True).get_future().then(then)
        assert (chained.wait() == 2.0).all()
    assert order == ["inner"] * 3


def test_callback_that_issues_and_waits() -> None:
    run_ranks(_callback_waits, 2)


def _many_callbacks_issue(rank: int, world_size: int, count: int) -> None:
    # Callbacks in callbacks, thousands deep, end in an error of the interpreter or a crash.
    n = 600 if count > 1000 else 3000
    first = [torch.ones(count) for _ in range(n)]
    second = [torch.full((count,), float(i)) for i in range(n)]
    issued = []

    def issue(tensor: torch.Tensor) -> None:
        issued.append(dist.all_reduce(tensor, async_op=True).get_future())

    works = [dist.all_reduce(tensor, async_op=True) for tensor in first]
    chained = [
        work.get_future().then(lambda _, tensor=tensor: issue(tensor))
        for work, tensor in zip(works, second, strict=True)
    ]
    for future in chained:
        future.wait()
    for future in issued:
        future.wait()
    assert len(issued) == n
    assert all((tensor == world_size).all() for tensor in first)
    assert all((tensor == world_size * i).all() for i, tensor in enumerate(second))


@pytest.mark.parametrize("count", [1, 100_000])
def test_thousands_of_callbacks_that_issue_operations(count: int) -> None:
    run_ranks(_many_callbacks_issue, 2, count)


def _callback_raises(rank: int, world_size: int) -> None:
    def bad(_: torch.futures.Future) -> None:
        raise ValueError("from the callback")

    chained = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(bad)
    expect_error(chained.wait, "from the callback")
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()


def test_callback_that_raises_breaks_nothing_else() -> None:
    run_ranks(_callback_raises, 2)


def _synchronous_between(rank: int, world_size: int) -> None:
    for step in range(100):
        work, outputs, values = start("all_reduce", rank, world_size, 70001 if step % 2 else 3)
        tensor = torch.full((5,), float(step))
        dist.all_reduce(tensor)
        assert (tensor == world_size * step).all()
        work.wait()
        assert (outputs[0] == values[0]).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_synchronous_operations_between_asynchronous_ones(world_size: int) -> None:
    run_ranks(_synchronous_between, world_size)


def _inputs_kept_alive(rank: int, world_size: int) -> None:
    works, outputs = [], []
    for step in range(50):
        output = torch.zeros(world_size * 70001)
        works.append(dist.all_gather_into_tensor(output, torch.full((70001,), float(rank + step)), async_op=True))
        outputs.append(output)
        torch.full((70001,), -5.0)  # Takes the memory of the input, if nobody holds it.
    for step, (work, output) in enumerate(zip(works, outputs, strict=True)):
        work.wait()
        expected = torch.arange(world_size).repeat_interleave(70001) + float(step)
        assert torch.equal(output, expected), f"operation {step} read a freed input"


def test_inputs_live_as_long_as_the_operation() -> None:
    run_ranks(_inputs_kept_alive, 2)


class _AllReduceGradient(torch.autograd.Function):
    """The identity, whose backward pass begins to all-reduce a tensor, as DDP's hooks do."""

    @staticmethod
    def forward(ctx, tensor, issue):  # type: ignore[no-untyped-def]
        ctx.issue = issue
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.issue()
        return gradient, None


def _in_backward(rank: int, world_size: int, count: int, seed: int) -> None:
    """The ranks come to the operations together, or one of them late, each time another."""
    rng = random.Random(seed)
    issued = []

    def issue(kind: str, delay_s: float) -> None:
        time.sleep(delay_s)
        issued.append((kind, *start(kind, rank, world_size, count)))
        if kind == "all_reduce":
            issued.append(("small", *start(kind, rank, world_size, 3)))

    for _ in range(12):
        value = torch.ones(1, requires_grad=True)
        out = value
        for _ in range(3):
            kind = rng.choice(["all_reduce", "all_reduce", "all_gather", "broadcast"])
            late, delay_s = rng.randrange(world_size), rng.choice([0, 0, 0.002])
            out = _AllReduceGradient.apply(out, lambda k=kind, d=delay_s if rank == late else 0.0: issue(k, d))
        out.sum().backward()
        for kind, work, outputs, values in reversed(issued):
            if rng.random() < 0.3:
                work.get_future().wait()
            work.wait()
            assert work.is_completed() and work.is_success()
            for output, expected in zip(outputs, values, strict=False):
                assert (output == expected).all(), f"{kind} n={count}: {output[0].item()}, not {expected}"
        issued.clear()


@pytest.mark.parametrize("count", [3000, 300000, 1500000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_backward(count: int, world_size: int) -> None:
    run_ranks(_in_backward, world_size, count, 7 * world_size + count)


def _errors_in_backward(rank: int, world_size: int) -> None:
    """A mismatch is an error on all ranks, and the next operation works."""
    works = []
    for round_index in range(6):
        value = torch.ones(1, requires_grad=True)
        tensor = torch.ones(5000 + (rank if round_index % 2 == 0 else 0))
        dist.barrier()
        _AllReduceGradient.apply(value, lambda t=tensor: works.append(dist.all_reduce(t, async_op=True))).backward()
        work = works.pop()
        if round_index % 2 == 0 and world_size > 1:
            expect_error(work.wait, "all_reduce", "5000", "5001")
            assert not work.is_success()
        else:
            work.wait()
            assert (tensor == world_size).all()


def test_errors_in_backward() -> None:
    run_ranks(_errors_in_backward, 2)


def _no_thread(rank: int, world_size: int, how: str) -> None:
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    # No room for the stack of one more thread, when those of threads that have ended are taken.
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + (3 << 20), resource.RLIM_INFINITY))
    is_over = threading.Event()
    with pytest.raises(RuntimeError):
        for _ in range(100):
            threading.Thread(target=is_over.wait, daemon=True).start()
    if rank == 1:
        time.sleep(0.5)
    if how == "message":
        message = torch.full((5,), 7.0) if rank == 0 else torch.zeros(5)
        work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
        work.wait(timedelta(seconds=20))
        assert message.tolist() == [7.0] * 5
    elif how == "message that is given up":
        message = torch.full((5,), 7.0) if rank == 0 else torch.zeros(5)
        if rank == 1:
            work = dist.irecv(message, 0)
            with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
                work.wait(timedelta(seconds=0.3))
        dist.all_reduce(tensor)
        if rank == 0:
            work = dist.isend(message, 1)
        work.wait()
        assert message.tolist() == [7.0] * 5
    else:
        work = dist.all_reduce(tensor, async_op=True)
        if how == "future":
            work.get_future().wait()
        else:
            work.wait(timedelta(seconds=20))
        assert tensor.tolist() == [float(world_size)] * 3
    dist.all_reduce(tensor)
    is_over.set()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["future", "wait with a limit", "message", "message that is given up"])
def test_operations_end_where_the_system_gives_no_thread(how: str) -> None:
    gloo_lacks("has its threads from the start")
    assert_clean_exits(run_fresh_processes(_no_thread, 2, how, group_timeout_s=25, timeout=60))
