"""What a DistributedOptimizer refuses, and how it says so."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from optimizer_training import check_same_everywhere, loss_of, make_model, make_sgd
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _rules(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = make_model()
        named = list(model.named_parameters())

        def wrap(**arguments: Any) -> Any:
            return hvd.DistributedOptimizer(make_sgd(model), **arguments)

        bad: dict[str, dict[str, Any]] = {
            "should be a sequence of tuples": {"named_parameters": model.parameters()},
            "must be unique. Found duplicates: 0.weight": {"named_parameters": [*named, ("0.weight", named[0][1])]},
            "were not named": {"named_parameters": named[1:]},
            "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
            "not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            "groups should be": {"groups": 0},
            "backward_passes_per_step must be a whole number, got 1.5": {"backward_passes_per_step": 1.5},
            "groups must consist of": {"groups": [["a"]]},
            "a list of lists of torch.Tensor, got a tensor": {"groups": [named[0][1]]},
            "only appear once": {"groups": [[named[0][1]], [named[0][1]]]},
        }
        for message, arguments in bad.items():
            with pytest.raises(ValueError, match=message.replace(".", r"\.")):
                wrap(**arguments)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            wrap(num_groups=2)
        assert wrap(backward_passes_per_step=2.0).backward_passes_per_step == 2
        wrap(groups=True)  # 1
        optimizer = wrap(named_parameters=named)
        loss_of(model, 0, rank).backward()
        with pytest.raises(AssertionError, match="before optimizer"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            loss_of(model, 0, rank).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        for step in range(2):
            loss_of(model, step, rank).backward()
        optimizer.step()
        loss_of(model, 0, rank).backward()
        optimizer.step()  # before all passes: goes out now
        check_same_everywhere(hvd, model)


def test_rules() -> None:
    run_ranks(_rules, 2)


def _layouts_differ(rank: int, size: int) -> None:
    with horovod() as hvd:
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        names = ["a", "b"] if rank == 0 else ["b", "a"]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), list(zip(names, parameters, strict=True))
        )
        (parameters[0] + parameters[1]).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"differ between ranks.*rank\(s\)"):
            optimizer.step()


def test_layouts_that_differ_are_an_error() -> None:
    run_ranks(_layouts_differ, 2)


def _not_copied(rank: int, size: int) -> None:
    with horovod() as hvd:
        for op in (hvd.Average, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(make_sgd(make_model()), op=op)
            for copied in (copy.deepcopy, copy.copy, pickle.dumps):
                with pytest.raises(TypeError, match="state_dict"):
                    copied(optimizer)


def test_is_not_copied() -> None:
    run_ranks(_not_copied, 2)


def _graphs(rank: int, size: int, width: int) -> None:
    with horovod() as hvd:
        model = nn.Linear(width, width)
        optimizer = hvd.DistributedOptimizer(make_sgd(model))
        with pytest.raises(AssertionError, match="create_graph"):
            model(torch.ones(2, width)).square().sum().backward(create_graph=True)
            optimizer.synchronize()


@pytest.mark.parametrize("width", [4, 600])
def test_gradients_with_graphs_are_refused(width: int) -> None:
    run_ranks(_graphs, 2, width)
