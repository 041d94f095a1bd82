"""Gradients that DistributedOptimizer sends from C++: large ones, for which ranks meet, and what needs Python."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks
from horovod_session import horovod
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

WIDTH = 1024  # a weight has 4 MiB


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)).to(dtype)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, WIDTH, generator=generator).to(dtype)).square().mean()


def _expected(model: nn.Module, step: int, size: int) -> list[torch.Tensor]:
    """The average of all ranks' gradients."""
    parameters = list(model.parameters())
    everyones = [torch.autograd.grad(_loss(model, step, rank), parameters) for rank in range(size)]
    return [torch.stack(gradients).mean(dim=0) for gradients in zip(*everyones, strict=True)]


def _check_step(hvd: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    expected = _expected(model, step, optimizer.process_set.size())
    optimizer.zero_grad()
    _loss(model, step, hvd.rank()).backward()
    _check_and_step(model, optimizer, expected)


def _check_and_step(model: nn.Module, optimizer: Any, expected: list[torch.Tensor]) -> None:
    optimizer.synchronize()
    for parameter, mean in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, mean)
    with optimizer.skip_synchronize():
        optimizer.step()


def _wrap(hvd: Any, model: nn.Module, **arguments: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **arguments)


def _follows(rank: int, size: int, dtype: torch.dtype, lateness: float) -> None:
    with horovod() as hvd:
        model = _model(dtype)
        optimizer = _wrap(hvd, model)
        for step in range(12):
            if rank == step % size:
                time.sleep(lateness)
            _check_step(hvd, model, optimizer, step)


@pytest.mark.parametrize("lateness", [0.0, 0.003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_large_gradients(size: int, dtype: torch.dtype, lateness: float) -> None:
    run_ranks(_follows, size, dtype, lateness)


def _other_orders(rank: int, size: int) -> None:
    """Two models whose backward passes come in another order on each rank: nobody meets, and nobody waits for ever."""
    with horovod() as hvd:
        models = [_model() for _ in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                named_parameters=[(f"{i}.{name}", parameter) for name, parameter in model.named_parameters()],
            )
            for i, model in enumerate(models)
        ]
        for step in range(12):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for i in (0, 1) if rank == 0 else (1, 0):
                _loss(models[i], step, rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        for model in models:
            flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            everyones = hvd.allgather(flat.unsqueeze(0))
            assert all(torch.equal(everyones[0], one) for one in everyones)


def test_ranks_with_other_orders() -> None:
    run_ranks(_other_orders, 2)


def _again(rank: int, size: int) -> None:
    import horon.torch as hvd

    model = _model()
    hvd.init()
    optimizer = _wrap(hvd, model)
    for step in range(6):
        if step in (2, 4):
            hvd.shutdown()
            hvd.init()
        _check_step(hvd, model, optimizer, step)
    hvd.shutdown()


def test_an_optimizer_outlives_its_engine() -> None:
    run_ranks(_again, 2)


def _in_flight(rank: int, size: int) -> None:
    """A name that the script uses itself just now is an error of backward(), of Horovod's type."""
    with horovod() as hvd:
        model = _model()
        optimizer = _wrap(hvd, model)
        _check_step(hvd, model, optimizer, 0)
        optimizer.zero_grad()
        if rank == 0:
            handle = hvd.allreduce_async_(torch.ones(3), name="0.weight")
            with pytest.raises(ValueError, match=r"same name as another tensor .*allreduce\.0\.weight"):
                _loss(model, 1, rank).backward()
        dist.barrier()
        if rank == 1:
            handle = hvd.allreduce_async_(torch.ones(3), name="0.weight")
        hvd.synchronize(handle)
        if rank == 1:
            _loss(model, 1, rank).backward()
        optimizer.synchronize()  # waits for what was sent, and sends what was not
        _check_step(hvd, model, optimizer, 2)


def test_a_name_in_flight() -> None:
    run_ranks(_in_flight, 2)


def _shut_down(rank: int, size: int) -> None:
    import horon.torch as hvd
    from horon.common.exceptions import HorovodInternalError

    hvd.init()
    model = _model()
    optimizer = _wrap(hvd, model)
    _check_step(hvd, model, optimizer, 0)
    _loss(model, 1, rank).backward()
    hvd.shutdown()
    with contextlib.suppress(ValueError, HorovodInternalError):
        optimizer.step()  # what was reduced before the shutdown is there


def test_shutdown_before_the_step_keeps_nobody() -> None:
    run_ranks(_shut_down, 2)


def _predivided(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        optimizer = _wrap(hvd, model, gradient_predivide_factor=2.0)
        for step in range(3):
            _check_step(hvd, model, optimizer, step)


def test_predivide_factor() -> None:
    run_ranks(_predivided, 2)


def _by_cpp(rank: int, size: int) -> None:
    """All buckets go out in the backward pass, without Python, and no gradient is copied."""
    with horovod() as hvd:
        model = _model()
        optimizer = _wrap(hvd, model)
        made_at: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.register_hook(lambda gradient, name=name: made_at.update({name: gradient.data_ptr()}))
        for step in range(3):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            assert optimizer._horon_reducer._hooks.not_sent() == []
            optimizer.step()
            large = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.numel() >= WIDTH * WIDTH}
            assert large == {name: made_at[name] for name in large}


def test_sent_by_cpp() -> None:
    run_ranks(_by_cpp, 2)


class _Positions(nn.Module):
    """For a batch of one, the gradient of `positions` is a view of what `tokens` gets next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.tokens(indices) + self.positions.unsqueeze(0)


def _shared_memory(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _Positions()
        optimizer = _wrap(hvd, model, op=hvd.Sum)
        indices = torch.arange(WIDTH).unsqueeze(0)
        for step in range(4):
            optimizer.zero_grad()
            (model(indices) * (step + 1)).sum().backward()
            optimizer.synchronize()
            for parameter in model.parameters():
                torch.testing.assert_close(parameter.grad, torch.full_like(parameter, size * (step + 1.0)))
            with optimizer.skip_synchronize():
                optimizer.step()


def test_gradients_that_share_memory() -> None:
    run_ranks(_shared_memory, 2)


class _Interrupt(Exception):
    pass


def _synchronize_until(optimizer: Any, seconds: float) -> None:
    """Waits for the gradients until a signal handler raises."""

    def give_up(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with pytest.raises(_Interrupt):
        optimizer.synchronize()
    signal.signal(signal.SIGALRM, before)


def _interrupted(rank: int, size: int) -> None:
    """A wait for gradients that a signal handler ended goes on where it was; nothing is sent twice."""
    with horovod() as hvd:
        model = _model()
        optimizer = _wrap(hvd, model)
        _check_step(hvd, model, optimizer, 0)
        expected = _expected(model, 1, size)
        optimizer.zero_grad()
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 + rank))
        middle = model[0](inputs)
        if rank == 1:
            middle.register_hook(lambda _: time.sleep(2))
        model[1:](middle).square().mean().backward()
        if rank == 0:
            _synchronize_until(optimizer, 0.5)
        _check_and_step(model, optimizer, expected)
        _check_step(hvd, model, optimizer, 2)


def test_a_wait_that_was_interrupted() -> None:
    run_ranks(_interrupted, 2)


def _laid_out_later(rank: int, size: int) -> None:
    """A first backward pass that fails, since nothing is initialised, spoils no later one."""
    import horon.torch as hvd

    model = _model()
    hvd.init()
    optimizer = _wrap(hvd, model)
    hvd.shutdown()
    with pytest.raises(ValueError, match="initialized"):
        _loss(model, 0, rank).backward()
    hvd.init()
    optimizer.load_state_dict(optimizer.state_dict())  # forgets what was in flight
    _check_step(hvd, model, optimizer, 1)
    hvd.shutdown()


def test_a_layout_that_failed() -> None:
    run_ranks(_laid_out_later, 2)


def _numbered_anew(rank: int, size: int) -> None:
    """Process sets have other numbers after another init()."""
    import horon.torch as hvd

    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    model = _model()
    hvd.init(process_sets=pairs)
    optimizer = _wrap(hvd, model, process_set=pairs[0])
    for again in range(2):
        if again:
            hvd.shutdown()
            hvd.init(process_sets=pairs[::-1])
        for step in range(2):
            if rank < 2:
                _check_step(hvd, model, optimizer, step)
    hvd.shutdown()


def test_process_sets_with_other_numbers() -> None:
    run_ranks(_numbered_anew, 3)


def _converted(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        optimizer = _wrap(hvd, model)
        _check_step(hvd, model, optimizer, 0)
        expected = _expected(model, 1, size)
        optimizer.zero_grad()
        _loss(model, 1, rank).backward()
        for parameter in model.parameters():
            parameter.grad = None
        model.double()
        optimizer.synchronize()
        for parameter, mean in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.float64
            torch.testing.assert_close(parameter.grad, mean.double(), rtol=1e-5, atol=1e-6)


def test_models_converted_without_their_gradients() -> None:
    run_ranks(_converted, 2)


class _Unused(nn.Module):
    """Small parameters, one of which gets no gradient, and a large one that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.used = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(8))


def _interrupted_in_python(rank: int, size: int) -> None:
    """The same while the wait is for a gradient that Python has sent, after one that it did not have to send."""
    with horovod() as hvd:
        model = _Unused()
        optimizer = _wrap(hvd, model)
        for step in range(3):
            optimizer.zero_grad()
            (model.used * (rank + 1)).sum().backward()
            if step == 1 and rank == 1:
                reducer = optimizer._horon_reducer
                small = next(bucket for bucket in reducer._buckets if len(bucket.parts[0].slots) == 2)
                reducer._send(small)
                time.sleep(2)
            if step == 1 and rank == 0:
                _synchronize_until(optimizer, 0.7)
            _check_and_step(model, optimizer, [torch.zeros(WIDTH, WIDTH), torch.full((8,), 1.5), torch.zeros(8)])


def test_a_wait_in_python_that_was_interrupted() -> None:
    run_ranks(_interrupted_in_python, 2)
