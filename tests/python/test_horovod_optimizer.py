"""DistributedOptimizer against the same training without it, on the gradients of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from optimizer_training import (
    check_same_everywhere,
    follow_reference,
    loss_of,
    make_model,
    make_sgd,
    named,
    reference_step,
)
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _basic(rank: int, size: int, set_to_none: bool, use_synchronize: bool) -> None:
    follow_reference(rank, size, make_sgd, named, set_to_none, use_synchronize=use_synchronize)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("use_synchronize", [False, True])
def test_follows_the_reference(size: int, set_to_none: bool, use_synchronize: bool) -> None:
    run_ranks(_basic, size, set_to_none, use_synchronize)


def _arguments(rank: int, size: int, which: str) -> None:
    def arguments(hvd: Any, model: nn.Module) -> dict[str, Any]:
        parameters = list(model.parameters())
        return {
            "unnamed": {},
            "sum": {"op": hvd.Sum},
            "predivide": {"gradient_predivide_factor": 2.0},
            "fp16": {"compression": hvd.Compression.fp16},
            "bf16": {"compression": hvd.Compression.bf16},
            "own compression": {"compression": _Halves},
            "groups=3": {"groups": 3},
            "groups": {"groups": [parameters[:2], [parameters[4], parameters[3]]]},
            "passes": {"backward_passes_per_step": 3},
        }[which] | ({} if which == "unnamed" else named(hvd, model))

    tolerance = {"fp16": 2e-3, "bf16": 2e-2}.get(which, 1e-5)
    scale = 1.0 if which == "sum" else None
    passes = 3 if which == "passes" else 1
    for set_to_none in (True, False):
        follow_reference(rank, size, make_sgd, arguments, set_to_none, passes, tolerance=tolerance, scale=scale)


class _Halves:
    """A user's own compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        return tensor * 0.5, "ctx"

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: str) -> torch.Tensor:
        assert ctx == "ctx"
        return tensor * 2


@pytest.mark.parametrize(
    "which",
    ["unnamed", "sum", "predivide", "fp16", "bf16", "own compression", "groups=3", "groups", "passes"],
)
def test_arguments(which: str) -> None:
    run_ranks(_arguments, 2, which)


def _every_optimizer(rank: int, size: int) -> None:
    from test_horovod_functions import _optimizer_classes

    for cls in _optimizer_classes():
        extra = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        bias = cls.__name__ != "Muon"
        # Division by the root of squares of gradients near zero makes differences in the last bit large.
        follow_reference(
            rank,
            size,
            lambda model, c=cls, e=extra: c(model.parameters(), lr=1e-3, **e),
            named,
            tolerance=2e-3,
            bias=bias,
        )


def test_every_optimizer() -> None:
    run_ranks(_every_optimizer, 2, timeout=120)


def _lbfgs(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"), model.named_parameters()
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank)
            loss.backward()
            return loss

        first = float(optimizer.step(closure))
        assert float(optimizer.step(closure)) < first
        check_same_everywhere(hvd, model)


def test_lbfgs_with_a_closure() -> None:
    run_ranks(_lbfgs, 2)


class _Branches(nn.Module):
    """Ranks may use different branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(400, 400)

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        return (self.second if use_second else self.first)(x)


def _missing(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _Branches()
        model.never.bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for _ in range(2):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            model(torch.ones(1, 4), use_second=rank % 2 == 1).sum().backward()
            optimizer.step()
            users = {"first": (size + 1) // 2, "second": size // 2, "never": 0}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    expected = users[name.split(".")[0]] / size
                    torch.testing.assert_close(p.grad, torch.full_like(p, expected))
                    torch.testing.assert_close(p.detach(), before[name] - expected)
            assert model.never.bias.grad is None
        check_same_everywhere(hvd, model)


@pytest.mark.parametrize("size", [2, 3])
def test_missing_gradients_are_zeros(size: int) -> None:
    run_ranks(_missing, size)


def _schedulers_and_hooks(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = make_model()
        inner = make_sgd(model)
        before_wrapping = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        calls: list[str] = []
        inner.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            scheduler.step()
        assert calls == ["pre", "post"] * 2
        before_wrapping.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, 5, rank).backward()
        optimizer.step()
        assert calls == ["pre", "post"] * 3
        check_same_everywhere(hvd, model)


def test_schedulers_and_hooks() -> None:
    run_ranks(_schedulers_and_hooks, 2)


def _amp(rank: int, size: int) -> None:
    with horovod() as hvd:
        model, plain_model = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
        plain = make_sgd(plain_model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            if step == 2 and rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            if step != 2:  # Every rank skips the step with the infinity of one.
                reference_step(plain_model, plain, [step], size, 1 / size)
                plain.step()
        assert scaler.get_scale() == 512.0
        for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        check_same_everywhere(hvd, model)


def test_grad_scaler() -> None:
    run_ranks(_amp, 2)


def _sparse(rank: int, size: int, as_dense: bool) -> None:
    with horovod() as hvd:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
        plain_model = copy.deepcopy(model)
        plain = torch.optim.SGD(plain_model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), sparse_as_dense=as_dense
        )
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            for r in range(size):
                words = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(10 * step + r))
                (plain_model(words).square().mean() / size).backward()
                if r == rank:
                    model(words).square().mean().backward()
            optimizer.synchronize()
            assert model[0].weight.grad.is_sparse
            with optimizer.skip_synchronize():
                optimizer.step()
            plain.step()
            torch.testing.assert_close(model[0].weight, plain_model[0].weight)
        check_same_everywhere(hvd, model)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    run_ranks(_sparse, 2, as_dense)


def _process_set(rank: int, size: int) -> None:
    import horon.torch as hvd

    inside = hvd.ProcessSet([0, 2])
    with horovod(process_sets=[inside]):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=inside
        )
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        expected = -1.0  # the mean of 0 and 2, and rank 1's own
        assert model.weight.flatten().tolist() == [expected] * 2


def test_process_set() -> None:
    run_ranks(_process_set, 3)


def _channels_last(rank: int, size: int) -> None:
    with horovod() as hvd:
        torch.manual_seed(0)
        for width in (4, 128):  # packed, and by itself
            model = nn.Conv2d(width, width, 3).to(memory_format=torch.channels_last)
            plain = copy.deepcopy(model)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            for step in range(2):
                optimizer.zero_grad()
                plain.zero_grad()
                for r in range(size):
                    x = torch.randn(1, width, 5, 5, generator=torch.Generator().manual_seed(10 * step + r))
                    x = x.to(memory_format=torch.channels_last)
                    (plain(x).square().mean() / size).backward()
                    if r == rank:
                        model(x).square().mean().backward()
                optimizer.synchronize()
                torch.testing.assert_close(model.weight.grad, plain.weight.grad)
                with optimizer.skip_synchronize():
                    optimizer.step()
                plain.load_state_dict(model.state_dict())


def test_channels_last() -> None:
    run_ranks(_channels_last, 2)
