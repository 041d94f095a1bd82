"""Parameters, optimizers and objects from one rank to all; sparse tensors; the timeline."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _parameters(rank: int, size: int) -> None:
    with horovod() as hvd:
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
        model = model.to(memory_format=torch.channels_last)
        shapes = [model.state_dict(), list(model.named_parameters()), model.named_parameters(), model.parameters()]
        for params in shapes:
            with torch.no_grad():
                model[0].weight.fill_(rank)
            hvd.broadcast_parameters(params, root_rank=size - 1)
            assert (model[0].weight == size - 1).all()
        state = {"tensor": torch.ones(2) * rank, "number": rank}
        hvd.broadcast_parameters(state, root_rank=0)
        assert state["number"] == 0 and state["tensor"].tolist() == [0, 0]
        for bad in (None, 3, torch.ones(2)):
            with pytest.raises(ValueError, match="invalid params of type"):
                hvd.broadcast_parameters(bad, root_rank=0)


def test_broadcast_parameters() -> None:
    run_ranks(_parameters, 2)


def _objects(rank: int, size: int) -> None:
    with horovod() as hvd:
        objects = [None, 3, "text", {"a": [1, 2]}, torch.arange(3), b"x" * 100000, lambda x: x + 1]
        for root, obj in itertools.product(range(size), objects):
            received = hvd.broadcast_object(obj if rank == root else None, root)
            if callable(obj):
                assert received(1) == 2
            else:
                assert str(received) == str(obj)
        gathered = hvd.allgather_object({"rank": rank, "data": "x" * 1000 * rank})
        assert [found["rank"] for found in gathered] == list(range(size))
        assert [len(found["data"]) for found in gathered] == [1000 * r for r in range(size)]
        mixed = hvd.allgather_object(rank if rank else "zero", name="mixed")
        assert mixed == ["zero", *range(1, size)]


@pytest.mark.parametrize("size", [1, 3])
def test_objects(size: int) -> None:
    run_ranks(_objects, size)


class _Unpicklable:
    """As an object with a lock or a stream in it."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle of \udc80this")  # which is no UTF-8


def _unpicklable_objects(rank: int, size: int) -> None:
    with horovod() as hvd:
        for culprit in range(size):
            is_culprit = rank == culprit
            expected, text = (TypeError, "^no pickle") if is_culprit else (RuntimeError, f"rank {culprit}.*no pickle")
            with pytest.raises(expected, match=text) as caught:
                hvd.broadcast_object(_Unpicklable() if is_culprit else None, culprit)
            # Not as one that elastic.run would start over for.
            assert not isinstance(caught.value, hvd.HorovodInternalError)
            with pytest.raises(expected, match=text):
                hvd.allgather_object([_Unpicklable()] if is_culprit else rank)
            with pytest.raises(expected, match=text):
                hvd.broadcast_parameters({"a": _Unpicklable() if is_culprit else 0}, culprit)
            assert hvd.broadcast_object(rank, culprit) == culprit
            assert hvd.allgather_object(rank) == list(range(size))
        with pytest.raises((RuntimeError, TypeError), match="no pickle" if rank in (0, 2) else r"rank 0: .*; rank 2: "):
            hvd.allgather_object(_Unpicklable() if rank in (0, 2) else None)
        evens = hvd.add_process_set([0, 2])
        if rank != 1:
            with pytest.raises(TypeError if rank == 2 else RuntimeError, match="no pickle"):
                hvd.broadcast_object(_Unpicklable() if rank == 2 else None, 2, process_set=evens)
            assert hvd.broadcast_object(rank, 2, process_set=evens) == 2


def test_objects_that_can_not_be_pickled() -> None:
    run_ranks(_unpicklable_objects, 3, timeout=60)


def _optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    found = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    classes = [c for c in found if issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer]
    left_out = ("LBFGS", "SparseAdam")
    return sorted((c for c in classes if c.__name__ not in left_out), key=lambda c: c.__name__)


def _make(cls: type[torch.optim.Optimizer], lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    bias = cls.__name__ != "Muon"  # which takes matrices only
    model = torch.nn.Sequential(torch.nn.Linear(5, 4, bias=bias), torch.nn.Linear(4, 3, bias=bias))
    extra = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    return model, cls(model.parameters(), lr=lr, **extra)


def _flat(optimizer: torch.optim.Optimizer) -> list[object]:
    state = optimizer.state_dict()
    options = [sorted((k, str(v)) for k, v in group.items()) for group in state["param_groups"]]
    values = [(i, k, str(v)) for i, entry in state["state"].items() for k, v in sorted(entry.items())]
    return [options, values]


def _optimizer_state(rank: int, size: int) -> None:
    with horovod() as hvd:
        for cls in _optimizer_classes():
            for distributed in (False, True):
                torch.manual_seed(rank)
                model, optimizer = _make(cls, lr=0.01 * (rank + 1))
                if distributed:
                    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
                if rank == 0:  # as after loading a checkpoint there
                    plain_model, plain = _make(cls, lr=0.01)
                    for _ in range(2):
                        plain_model(torch.ones(2, 5)).square().sum().backward()
                        plain.step()
                    optimizer.load_state_dict(plain.state_dict())
                before = [p.detach().clone() for p in model.parameters()]
                expected = hvd.broadcast_object(_flat(optimizer), 0)
                was_empty = not optimizer.state  # some have a state from the beginning
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
                assert _flat(optimizer) == expected, cls
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                if was_empty:
                    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
                hvd.broadcast_parameters(model.state_dict(), 0)
                optimizer.zero_grad()
                model(torch.ones(2, 5) * (1 if not distributed else rank + 1)).square().sum().backward()
                optimizer.step()
                if not distributed:
                    continue
                weights = hvd.allgather(model[0].weight.detach().unsqueeze(0))
                assert all(torch.equal(weights[0], w) for w in weights), cls
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0)


def test_broadcast_optimizer_state() -> None:
    run_ranks(_optimizer_state, 2, timeout=120)


def _fresh_and_different(rank: int, size: int) -> None:
    with horovod() as hvd:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([parameter], lr=0.1 + rank, betas=(0.5, 0.6) if rank == 0 else (0.7, 0.8))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["betas"] == (0.5, 0.6)
        assert parameter.grad is not None and not parameter.grad.any() and (parameter == 1).all()
        n = 1 if rank == 0 else 2
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)) for _ in range(n)], lr=1.0)
        if rank == 0:
            hvd.broadcast_optimizer_state(other, 0)
        else:
            with pytest.raises(ValueError, match=r"\[2\] parameters.*\[1\]"):
                hvd.broadcast_optimizer_state(other, 0)


def test_optimizer_options() -> None:
    run_ranks(_fresh_and_different, 2)


def _sparse_optimizer_state(rank: int, size: int) -> None:
    with horovod() as hvd:
        for cls, bag, distributed in itertools.product(
            (torch.optim.SparseAdam, torch.optim.SGD), (False, True), (False, True)
        ):
            kind = torch.nn.EmbeddingBag if bag else torch.nn.Embedding
            model = torch.nn.Sequential(kind(6, 3, sparse=True))
            dense = [] if cls is torch.optim.SparseAdam else [torch.nn.Parameter(torch.ones(2))]
            optimizer = cls([*model.parameters(), *dense], lr=0.1)
            if distributed:
                named = [*model.named_parameters(), *(("dense", parameter) for parameter in dense)]
                optimizer = hvd.DistributedOptimizer(optimizer, named)
            hvd.broadcast_optimizer_state(optimizer, 0, model if dense else None)
            hvd.broadcast_parameters(model.state_dict(), 0)
            for parameter in dense:
                assert parameter.grad is not None and not parameter.grad.any()
            before = model[0].weight.detach().clone()
            model(torch.tensor([[1, 2]])).sum().backward()  # no zero_grad() before the first step
            optimizer.step()
            assert model[0].weight.grad.is_sparse
            changed = (model[0].weight != before).any(dim=1)
            assert changed.tolist() == [False, True, True, False, False, False]


def test_optimizer_state_leaves_sparse_gradients_sparse() -> None:
    run_ranks(_sparse_optimizer_state, 2)


def _sparse(rank: int, size: int) -> None:
    with horovod() as hvd:
        for op in (hvd.Average, hvd.Sum):
            indices = torch.tensor([[rank, 0], [0, 1]])
            mine = torch.sparse_coo_tensor(indices, torch.tensor([[1.0, 2.0]] * 2), (size, 2, 2))
            wait = hvd.sparse_allreduce_async(mine, "sparse", op)
            dense = [
                torch.sparse_coo_tensor(
                    torch.tensor([[r, 0], [0, 1]]), torch.tensor([[1.0, 2.0]] * 2), (size, 2, 2)
                ).to_dense()
                for r in range(size)
            ]
            expected = sum(dense) / (size if op == hvd.Average else 1)
            torch.testing.assert_close(wait().to_dense(), expected)
        with pytest.raises(ValueError, match="Average or Sum"):
            hvd.sparse_allreduce_async(mine, "sparse", hvd.Max)


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_allreduce(size: int) -> None:
    run_ranks(_sparse, size)


def _timeline(rank: int, size: int, folder: str) -> None:
    with horovod() as hvd:
        # All ranks name one file, and rank 0 writes it. A second start goes on with another one.
        for number in range(3):
            path = Path(folder) / f"{number}.json"
            hvd.start_timeline(str(path), mark_cycles=number > 0)
            hvd.start_timeline(str(path), mark_cycles=number > 0)
            hvd.allreduce(torch.ones(3), name="seen")
            # What has happened is there while the timeline goes on, so that a job that hangs can be looked at.
            if rank == 0:
                running = path.read_text()
                assert "allreduce.seen" in running and '"ph":"E","name":"ALLREDUCE"' in running
                assert json.loads(running + "]")
            if number != 1:
                hvd.stop_timeline()
        hvd.barrier()
        for number in range(3):
            text = (Path(folder) / f"{number}.json").read_text()
            events = json.loads(text)
            for seen in ("allreduce.seen", "NEGOTIATE_ALLREDUCE", "start_time_since_epoch_in_micros"):
                assert seen in text, (number, seen)
            assert ("CYCLE_START" in text) == (number > 0)
            rows = [event for event in events if event["ph"] in "BE" and event["name"] == "ALLREDUCE"]
            assert [event["ph"] for event in rows] == ["B", "E"] and {event["pid"] for event in rows} == {0}


def test_timeline(tmp_path: Path) -> None:
    run_ranks(_timeline, 2, str(tmp_path))
