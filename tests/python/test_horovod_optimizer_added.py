"""Parameters that a DistributedOptimizer gets during the training."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from optimizer_training import check_same_everywhere, loss_of, make_model, make_sgd, reference_step
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _added_groups(rank: int, size: int, is_named: bool) -> None:
    """Layers that are unfrozen during the training, as in fine-tuning."""
    with horovod() as hvd:
        model = make_model()
        plain_model = copy.deepcopy(model)
        optimizers = []
        for each in (model, plain_model):
            last, *_ = (module for module in reversed(each) if isinstance(module, nn.Linear))
            optimizers.append(torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9))
        named = {"named_parameters": model.named_parameters()} if is_named else {}
        optimizer, plain = hvd.DistributedOptimizer(optimizers[0], **named), optimizers[1]
        for step in range(4):
            if step == 2:
                for each, own in ((model, optimizer), (plain_model, plain)):
                    mine = {p for group in own.param_groups for p in group["params"]}
                    own.add_param_group({"params": [p for p in each.parameters() if p not in mine], "lr": 0.2})
            reference_step(plain_model, plain, [step], size, 1 / size)
            plain.step()
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if step == 1:
                with pytest.raises(AssertionError, match="add_param_group"):
                    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
            optimizer.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        check_same_everywhere(hvd, model)


@pytest.mark.parametrize("is_named", [False, True])
def test_groups_that_are_added_later(is_named: bool) -> None:
    run_ranks(_added_groups, 2, is_named)


def _unfrozen(rank: int, size: int, passes: int) -> None:
    with horovod() as hvd:
        model = make_model()
        plain_model = copy.deepcopy(model)
        for each in (model, plain_model):
            each[0].requires_grad_(False)
        optimizer, plain = (
            hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=passes),
            make_sgd(plain_model),
        )
        for step in range(5):
            if step == 2:
                for each in (model, plain_model):
                    each[0].requires_grad_()
            steps = [10 * step + p for p in range(passes)]
            reference_step(plain_model, plain, steps, size, 1 / size)
            plain.step()
            optimizer.zero_grad()
            for number in steps:
                loss_of(model, number, rank).backward()
            optimizer.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        check_same_everywhere(hvd, model)


@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_that_are_unfrozen(passes: int) -> None:
    run_ranks(_unfrozen, 2, passes)
