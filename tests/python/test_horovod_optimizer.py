"""DistributedOptimizer against the same training without it, on the gradients of all ranks."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import horon
import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


def _model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    # Small gradients that go together, and one of 360 KB that goes by itself.
    return nn.Sequential(
        nn.Linear(20, 300, bias), nn.Tanh(), nn.Linear(300, 300, bias), nn.Tanh(), nn.Linear(300, 3, bias)
    )


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(_batch(step, rank)).square().mean()


def _reference_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[int], size: int, scale: float
) -> None:
    """The gradients of all ranks' batches, added up in this process."""
    optimizer.zero_grad()
    for step in steps:
        for rank in range(size):
            (_loss(model, step, rank) * scale).backward()


def _same_everywhere(hvd: Any, model: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(everyones[0], one) for one in everyones), "ranks have different parameters"


def _follow_reference(
    rank: int,
    size: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    arguments: Callable[[Any, nn.Module], dict[str, Any]],
    set_to_none: bool = True,
    passes: int = 1,
    use_synchronize: bool = False,
    tolerance: float = 1e-5,
    scale: float | None = None,
    bias: bool = True,
) -> None:
    with horovod() as hvd:
        model = _model(bias)
        plain_model = copy.deepcopy(model)
        plain = make(plain_model)
        optimizer = hvd.DistributedOptimizer(make(model), **arguments(hvd, model))
        assert isinstance(optimizer, type(plain)) and isinstance(optimizer, torch.optim.Optimizer)
        assert type(optimizer).__name__ == type(plain).__name__
        for step in range(4):
            steps = [10 * step + p for p in range(passes)]
            _reference_step(plain_model, plain, steps, size, 1 / size if scale is None else scale)
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert all(p.grad is None for p in model.parameters())
            else:
                assert step == 0 or not any(p.grad.any() for p in model.parameters())
            for number in steps:
                _loss(model, number, rank).backward()
            if use_synchronize:
                optimizer.synchronize()
                for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                nn.utils.clip_grad_norm_(plain_model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            plain.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)
        _same_everywhere(hvd, model)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _named(hvd: Any, model: nn.Module, **more: Any) -> dict[str, Any]:
    return {"named_parameters": model.named_parameters(), **more}


def _basic(rank: int, size: int, set_to_none: bool, use_synchronize: bool) -> None:
    _follow_reference(rank, size, _sgd, _named, set_to_none, use_synchronize=use_synchronize)


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
        }[which] | ({} if which == "unnamed" else _named(hvd, model))

    tolerance = {"fp16": 2e-3, "bf16": 2e-2}.get(which, 1e-5)
    scale = 1.0 if which == "sum" else None
    passes = 3 if which == "passes" else 1
    for set_to_none in (True, False):
        _follow_reference(rank, size, _sgd, arguments, set_to_none, passes, tolerance=tolerance, scale=scale)


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
        _follow_reference(
            rank,
            size,
            lambda model, c=cls, e=extra: c(model.parameters(), lr=1e-3, **e),
            _named,
            tolerance=2e-3,
            bias=bias,
        )


def test_every_optimizer() -> None:
    run_ranks(_every_optimizer, 2, timeout=120)


def _lbfgs(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"), model.named_parameters()
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, 0, rank)
            loss.backward()
            return loss

        first = float(optimizer.step(closure))
        assert float(optimizer.step(closure)) < first
        _same_everywhere(hvd, model)


def test_lbfgs_with_a_closure() -> None:
    run_ranks(_lbfgs, 2)


def _in_the_arena(rank: int, size: int, set_to_none: bool) -> None:
    with horovod() as hvd:
        model = _model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            _loss(model, step, rank).backward()
            optimizer.step()
        small = [p for p in model.parameters() if p.numel() * 4 < 256 * 1024]
        assert small and all(horon.is_in_arena(p.grad) for p in small)
        # With set_to_none autograd makes the large ones, right in the arena.
        assert all(horon.is_in_arena(p.grad) for p in model.parameters())
        addresses = {p.grad.data_ptr() for p in small}
        optimizer.zero_grad(set_to_none=set_to_none)
        _loss(model, 9, rank).backward()
        optimizer.step()
        assert addresses == {p.grad.data_ptr() for p in small}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_live_in_the_arena(set_to_none: bool) -> None:
    run_ranks(_in_the_arena, 2, set_to_none)


def _only_gradients_in_the_arena(rank: int, size: int) -> None:
    weight = torch.ones(300, 300)
    with horovod() as hvd:
        model = _model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        seen = []

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append(horon.is_in_arena(x @ weight))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> Any:
                seen.append(horon.is_in_arena(torch.empty(300, 300)))  # what autograd makes of that size
                seen.append(horon.is_in_arena(torch.empty(300, 301)))
                return grads[0].clone()

        Watch.apply(model[:2](_batch(0, rank).repeat(20, 1)[:300])).mean().backward()
        assert seen == [False, True, False], seen
        assert not horon.is_in_arena(torch.empty(300, 300))
        optimizer.step()
        before = horon.arena_statistics()["used_bytes"]
        for _ in range(50):
            optimizer.zero_grad()
            _loss(model, 1, rank).backward()
            optimizer.step()
        after = horon.arena_statistics()["used_bytes"]
        assert after < before + 2 * 4 * 300 * 300, (before, after)  # what autograd made last, and no more
        kept = model[2].weight.grad.clone()
        assert kept.isfinite().all()
        gradient = model[2].weight.grad
        del optimizer
        gc.collect()
        model.zero_grad()
        _loss(model, 1, rank).backward()
        assert not horon.is_in_arena(model[2].weight.grad)
    # The gradient outlives the optimizer, and horon.
    assert torch.equal(gradient, kept)


def test_nothing_but_gradients_is_made_in_the_arena() -> None:
    # No fusion: its buffer, which lies in the arena too, would be made at a time that depends on the threads.
    run_ranks(_only_gradients_in_the_arena, 2, env={"HORON_FUSION_THRESHOLD": "0"})


def test_gradients_elsewhere_without_an_arena() -> None:
    run_ranks(_without_arena, 2, env={"HORON_ARENA_BYTES": "0"})


def _without_arena(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            optimizer.step()
        _same_everywhere(hvd, model)
        assert hvd.allreduce(torch.ones(1 << 19), op=hvd.Sum).sum().item() == size * (1 << 19)


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
        _same_everywhere(hvd, model)


@pytest.mark.parametrize("size", [2, 3])
def test_missing_gradients_are_zeros(size: int) -> None:
    run_ranks(_missing, size)


def _rules(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        named = list(model.named_parameters())

        def wrap(**arguments: Any) -> Any:
            return hvd.DistributedOptimizer(_sgd(model), **arguments)

        bad: dict[str, dict[str, Any]] = {
            "should be a sequence of tuples": {"named_parameters": model.parameters()},
            "must be unique. Found duplicates: 0.weight": {"named_parameters": [*named, ("0.weight", named[0][1])]},
            "were not named": {"named_parameters": named[1:]},
            "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
            "not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            "groups should be": {"groups": 0},
            "groups must consist of": {"groups": [["a"]]},
            "only appear once": {"groups": [[named[0][1]], [named[0][1]]]},
        }
        for message, arguments in bad.items():
            with pytest.raises(ValueError, match=message.replace(".", r"\.")):
                wrap(**arguments)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            wrap(num_groups=2)
        optimizer = wrap(named_parameters=named)
        _loss(model, 0, rank).backward()
        with pytest.raises(AssertionError, match="before optimizer"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            _loss(model, 0, rank).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        for step in range(2):
            _loss(model, step, rank).backward()
        optimizer.step()
        _loss(model, 0, rank).backward()
        optimizer.step()  # before all passes: goes out now
        _same_everywhere(hvd, model)


def test_rules() -> None:
    run_ranks(_rules, 2)


def _schedulers_and_hooks(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        inner = _sgd(model)
        before_wrapping = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        calls: list[str] = []
        inner.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(2):
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            optimizer.step()
            scheduler.step()
        assert calls == ["pre", "post"] * 2
        before_wrapping.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        _loss(model, 5, rank).backward()
        optimizer.step()
        assert calls == ["pre", "post"] * 3
        _same_everywhere(hvd, model)


def test_schedulers_and_hooks() -> None:
    run_ranks(_schedulers_and_hooks, 2)


def _amp(rank: int, size: int) -> None:
    with horovod() as hvd:
        model, plain_model = _model(), _model()
        optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
        plain = _sgd(plain_model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = _loss(model, step, rank)
            if step == 2 and rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            if step != 2:  # Every rank skips the step with the infinity of one.
                _reference_step(plain_model, plain, [step], size, 1 / size)
                plain.step()
        assert scaler.get_scale() == 512.0
        for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        _same_everywhere(hvd, model)


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
        _same_everywhere(hvd, model)


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


def _added_groups(rank: int, size: int, is_named: bool) -> None:
    """Layers that are unfrozen during the training, as in fine-tuning."""
    with horovod() as hvd:
        model = _model()
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
            _reference_step(plain_model, plain, [step], size, 1 / size)
            plain.step()
            optimizer.zero_grad()
            _loss(model, step, rank).backward()
            if step == 1:
                with pytest.raises(AssertionError, match="add_param_group"):
                    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
            optimizer.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        _same_everywhere(hvd, model)


@pytest.mark.parametrize("is_named", [False, True])
def test_groups_that_are_added_later(is_named: bool) -> None:
    run_ranks(_added_groups, 2, is_named)


def _unfrozen(rank: int, size: int, passes: int) -> None:
    with horovod() as hvd:
        model = _model()
        plain_model = copy.deepcopy(model)
        for each in (model, plain_model):
            each[0].requires_grad_(False)
        optimizer, plain = hvd.DistributedOptimizer(_sgd(model), backward_passes_per_step=passes), _sgd(plain_model)
        for step in range(5):
            if step == 2:
                for each in (model, plain_model):
                    each[0].requires_grad_()
            steps = [10 * step + p for p in range(passes)]
            _reference_step(plain_model, plain, steps, size, 1 / size)
            plain.step()
            optimizer.zero_grad()
            for number in steps:
                _loss(model, number, rank).backward()
            optimizer.step()
            for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        _same_everywhere(hvd, model)


@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_that_are_unfrozen(passes: int) -> None:
    run_ranks(_unfrozen, 2, passes)


def _not_copied(rank: int, size: int) -> None:
    with horovod() as hvd:
        for op in (hvd.Average, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(_sgd(_model()), op=op)
            for copied in (copy.deepcopy, copy.copy, pickle.dumps):
                with pytest.raises(TypeError, match="state_dict"):
                    copied(optimizer)


def test_is_not_copied() -> None:
    run_ranks(_not_copied, 2)


def _graphs(rank: int, size: int, width: int) -> None:
    with horovod() as hvd:
        model = nn.Linear(width, width)
        optimizer = hvd.DistributedOptimizer(_sgd(model))
        with pytest.raises(AssertionError, match="create_graph"):
            model(torch.ones(2, width)).square().sum().backward(create_graph=True)
            optimizer.synchronize()


@pytest.mark.parametrize("width", [4, 600])
def test_gradients_with_graphs_are_refused(width: int) -> None:
    run_ranks(_graphs, 2, width)


def _hooks_go_with_the_optimizer(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = _model()
        for _ in range(3):  # as in a loop that wraps anew: the old ones must not send
            optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
            optimizer.zero_grad()
            _loss(model, 0, rank).backward()
            optimizer.step()
        del optimizer
        _loss(model, 0, rank).backward()
        _loss(model, 0, rank).backward()


def test_hooks_go_with_the_optimizer() -> None:
    run_ranks(_hooks_go_with_the_optimizer, 2)
