"""Elastic training on a fixed set of ranks: state, sampler, and the loop that starts over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _train(rank: int, size: int) -> list[float]:
    from horon.common.exceptions import HostsUpdatedInterrupt

    with horovod() as hvd:
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        sampler = hvd.elastic.ElasticSampler(range(16), shuffle=False)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, sampler=sampler)
        resets: list[int] = []
        failures = [3, 5]
        state.register_reset_callbacks([lambda: resets.append(state.batch)])

        @hvd.elastic.run
        def train(state: object, steps: int) -> str:
            while state.batch < steps:
                state.optimizer.zero_grad()
                state.model(torch.ones(2, 3) * (state.batch + rank)).square().mean().backward()
                state.optimizer.step()
                state.batch += 1
                if failures and state.batch == failures[0]:
                    if failures.pop(0) == 3:
                        hvd.allreduce(torch.ones(2 + rank), name="disagree")  # HorovodInternalError on all ranks
                    state.commit()
                    raise HostsUpdatedInterrupt(skip_sync=False)
                state.commit()
            return "done"

        assert train(state, 7) == "done"
        assert resets == [2, 5] and state.batch == 7
        return [*model.weight.flatten().tolist(), float(optimizer.state_dict()["state"][0]["momentum_buffer"].sum())]


def _train_without_failures(rank: int, size: int) -> list[float]:
    with horovod() as hvd:
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        for batch in range(7):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (batch + rank)).square().mean().backward()
            optimizer.step()
        return [*model.weight.flatten().tolist(), float(optimizer.state_dict()["state"][0]["momentum_buffer"].sum())]


def test_starts_over() -> None:
    with_failures = run_ranks(_train, 2)
    assert with_failures[0] == with_failures[1] == run_ranks(_train_without_failures, 2)[0]


def _sampler(rank: int, size: int) -> None:
    with horovod() as hvd:
        for shuffle in (False, True):
            sampler = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle, seed=5)
            mine = list(sampler)
            assert len(mine) == len(sampler) == -(-11 // size)
            everyones = [i for one in hvd.allgather_object(mine) for i in one]
            assert set(everyones) == set(range(11))
            sampler.record_batch(0, 2)
            saved = sampler.state_dict()
            assert saved == {"epoch": 0, "processed_num": 2 * size}
            other = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle, seed=5)
            other.load_state_dict(saved)
            rest = [i for one in hvd.allgather_object(list(other)) for i in one]
            done = [i for one in hvd.allgather_object(mine[:2]) for i in one]
            assert set(rest) | set(done) == set(range(11)) and not set(rest) & set(done)
            sampler.set_epoch(1)
            assert (list(sampler) != mine) == shuffle
            sampler.record_batch(0, 11)
            sampler.load_state_dict(sampler.state_dict())
            assert list(sampler) == [] and len(sampler) == 0


@pytest.mark.parametrize("size", [1, 2])
def test_sampler(size: int) -> None:
    run_ranks(_sampler, size)


lr = torch.optim.lr_scheduler
SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: lr.StepLR(optimizer, 2),
    lambda optimizer: lr.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    lambda optimizer: lr.OneCycleLR(optimizer, 1.0, total_steps=20),
    lambda optimizer: lr.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False, scale_fn=lambda x: x),
    lambda optimizer: lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)], [2]),
    lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=1),
]


def _step(scheduler: Any) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))


def _scheduled(rank: int, size: int, is_made_first: bool) -> None:
    with horovod() as hvd:
        for make in SCHEDULERS:
            model = torch.nn.Linear(2, 2)
            own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = make(own) if is_made_first else None
            optimizer = hvd.DistributedOptimizer(own, model.named_parameters())
            scheduler = scheduler or make(optimizer)
            used = scheduler.optimizer
            state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=rank)
            for _ in range(rank + 3):  # the ranks differ
                with optimizer.skip_synchronize():
                    optimizer.step()
                _step(scheduler)

            def found(scheduler: Any = scheduler, optimizer: Any = optimizer) -> tuple[int, Any, float]:
                return scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]

            state.sync()
            everyones = hvd.allgather_object(found())
            assert everyones == [everyones[0]] * size and everyones[0][0] == 3, everyones
            assert state.scheduler is scheduler and scheduler.optimizer is used
            _step(scheduler)
            after_four = found()
            state.restore()
            assert found() == everyones[0]
            _step(scheduler)
            assert found() == after_four, "went another way after it had gone back"
            state.commit()
            _step(scheduler)
            state.restore()
            assert found() == after_four


@pytest.mark.parametrize("is_made_first", [True, False])
def test_schedulers(is_made_first: bool) -> None:
    run_ranks(_scheduled, 2, is_made_first, timeout=60)


def _state(rank: int, size: int) -> None:
    from horon.common.exceptions import HostsUpdatedInterrupt

    with horovod() as hvd:
        model = torch.nn.Linear(2, 2)
        state = hvd.elastic.TorchState(model=model, epoch=rank + 4, name=f"rank{rank}")
        state.sync()
        assert (state.epoch, state.name) == (4, "rank0")
        weight = model.weight.detach().clone()
        state.epoch = 9
        with torch.no_grad():
            model.weight.zero_()
        state.restore()
        assert state.epoch == 4 and torch.equal(model.weight, weight)
        state.epoch = 10
        state.commit()
        state.epoch = 11
        state.restore()
        assert state.epoch == 10
        state.model = torch.nn.Linear(2, 2)  # a new object is saved at once
        if rank == 0:
            state.on_hosts_updated(1.0, 1)
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.check_host_updates()
        assert caught.value.skip_sync
        state.check_host_updates()


def test_state() -> None:
    run_ranks(_state, 2)
