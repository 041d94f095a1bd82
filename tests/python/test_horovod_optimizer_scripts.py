"""What scripts written for Horovod do with a DistributedOptimizer: optimizers with methods of their own, closures,
several wrappers, sets of parameters, compressions derived from others, attributes."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import horon
import pytest
import torch
from harness import on_gloo, run_ranks
from horovod_session import horovod
from torch import nn

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

LARGE = 300 * 300  # goes by itself


class _OwnZeroGrad(torch.optim.SGD):
    """As apex's FusedAdam: methods without torch's arguments."""

    calls = 0

    def zero_grad(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.was_strict = strict
        super().load_state_dict(state_dict)


class _KeepsGradients(torch.optim.SGD):
    """One whose zero_grad leaves zeros unless told otherwise."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def _step(optimizer: Any, parameter: nn.Parameter, factor: float) -> None:
    (parameter * factor).sum().backward()
    optimizer.step()


def _own_methods(rank: int, size: int) -> None:
    with horovod() as hvd:
        for n_elements in (3, LARGE):
            parameter = nn.Parameter(torch.zeros(n_elements))
            optimizer = hvd.DistributedOptimizer(_OwnZeroGrad([parameter], lr=1.0), [("a", parameter)])
            for _ in range(2):
                optimizer.zero_grad()
                assert parameter.grad is None
                _step(optimizer, parameter, rank)
            assert optimizer.calls == 2
            torch.testing.assert_close(parameter.detach(), torch.full((n_elements,), -float(sum(range(size)))))
            optimizer.load_state_dict(optimizer.state_dict(), strict=False)
            assert optimizer.was_strict is False
            optimizer.load_state_dict(state_dict=optimizer.state_dict())
            assert optimizer.was_strict is True
            with pytest.raises(TypeError):
                optimizer.zero_grad(set_to_none=True)  # which its own would not take either

            optimizer = hvd.DistributedOptimizer(_KeepsGradients([parameter], lr=1.0), [("a", parameter)])
            optimizer.zero_grad(True)
            for _ in range(2):
                _step(optimizer, parameter, rank)
                assert parameter.grad.eq(sum(range(size)) / size).all()
                optimizer.zero_grad()
                assert parameter.grad is not None and not parameter.grad.any()
            optimizer.zero_grad(set_to_none=True)
            assert parameter.grad is None


def test_optimizers_with_methods_of_their_own() -> None:
    run_ranks(_own_methods, 2)


def _closures(rank: int, size: int) -> None:
    with horovod() as hvd:
        mean = sum(range(size)) / size
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], op=hvd.Sum, backward_passes_per_step=2
        )

        def backward() -> torch.Tensor:
            loss = (parameter * rank).sum()
            loss.backward()
            return loss

        for n_passes in (1, 2):  # local gradients, and some under way
            for _ in range(n_passes):
                backward()
            optimizer.step(lambda: 0.0)  # which only looks
            torch.testing.assert_close(parameter.grad, torch.full((3,), n_passes * mean * size))
            optimizer.zero_grad()

        optimizer.set_backward_passes_per_step(1)
        backward()
        before = parameter.detach().clone()

        def anew() -> torch.Tensor:
            assert parameter.grad.eq(mean * size).all()  # reduced before the closure
            optimizer.zero_grad()
            return backward()

        optimizer.step(anew)
        torch.testing.assert_close(parameter.detach(), before - mean * size)
        optimizer.zero_grad()
        optimizer.step(backward)
        torch.testing.assert_close(parameter.detach(), before - 2 * mean * size)


def test_gradients_that_are_there_before_a_closure() -> None:
    run_ranks(_closures, 2)


def _two_optimizers(rank: int, size: int) -> None:
    """Backward passes in another order on each rank, as in a GAN that alternates."""
    with horovod() as hvd:
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(f"weight.{i}", p)])
            for i, p in enumerate(parameters)
        ]
        for i in (0, 1) if rank == 0 else (1, 0):
            (parameters[i] * (rank + 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for parameter in parameters:
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -1.5))


def test_two_optimizers_in_any_order() -> None:
    run_ranks(_two_optimizers, 2)


def _sets_of_parameters(rank: int, size: int) -> None:
    with horovod() as hvd:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2 + i, 3 + i) for i in range(4)))
        in_any_order = sorted(model.parameters(), key=lambda p: hash((p.shape, rank)))
        for groups in (None, 2):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([{"params": in_any_order[:3]}, {"params": in_any_order[3:]}], lr=1.0),
                model.named_parameters(),
                groups=groups,
            )
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                everyones = hvd.allgather(parameter.detach().unsqueeze(0))
                assert all(torch.equal(everyones[0], one) for one in everyones)


def test_parameter_groups_made_from_sets() -> None:
    run_ranks(_sets_of_parameters, 3)


def _derived_compression(rank: int, size: int) -> None:
    import horon.torch as hvd

    class Scaled(hvd.Compression.fp16):
        """Keeps large gradients from overflowing."""

        calls: ClassVar[list[str]] = []

        @classmethod
        def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            cls.calls.append("compress")
            return super().compress(tensor / 1024)

        @classmethod
        def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            cls.calls.append("decompress")
            return super().decompress(tensor, ctx) * 1024

    with horovod():
        for n_elements in (3, LARGE):
            Scaled.calls.clear()
            parameter = nn.Parameter(torch.zeros(n_elements))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], compression=Scaled
            )
            _step(optimizer, parameter, 1e6)  # infinite in float16
            torch.testing.assert_close(parameter.detach(), torch.full((n_elements,), -1e6), rtol=1e-3, atol=0)
            assert Scaled.calls == ["compress", "decompress"]


def test_a_compression_derived_from_fp16() -> None:
    run_ranks(_derived_compression, 2)


def _attributes(rank: int, size: int) -> None:
    import horon.torch as hvd

    evens = hvd.ProcessSet([0])
    with horovod(process_sets=[evens]):
        parameter = nn.Parameter(torch.zeros(3))

        def wrap(**arguments: Any) -> Any:
            return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], **arguments)

        optimizer = wrap()
        found = optimizer.op, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense, optimizer.process_set
        assert found == (hvd.Average, 1.0, False, hvd.global_process_set)
        other = wrap(op=hvd.Sum, sparse_as_dense=True, process_set=evens)
        assert (other.op, other.sparse_as_dense, other.process_set) == (hvd.Sum, True, evens)
        assert wrap(gradient_predivide_factor=2.0).gradient_predivide_factor == 2.0

        optimizer.backward_passes_per_step = 2
        assert optimizer.backward_passes_per_step == 2
        for _ in range(2):
            (parameter * rank).sum().backward()
        optimizer.step()
        torch.testing.assert_close(parameter.grad, torch.full((3,), 2 * sum(range(size)) / size))


def test_attributes() -> None:
    run_ranks(_attributes, 2)


def _attributes_that_are_set(rank: int, size: int) -> None:
    import horon.torch as hvd

    pair = hvd.ProcessSet([0, 2])
    with horovod(process_sets=[pair]):
        for n_elements in (3, LARGE):
            parameter = nn.Parameter(torch.zeros(n_elements))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)])

            def gradient(one: Any = optimizer, of: nn.Parameter = parameter) -> float:
                one.zero_grad(set_to_none=False)
                (of * (rank + 1)).sum().backward()
                one.step()
                assert of.grad.eq(of.grad[0]).all()
                return of.grad[0].item()

            assert gradient() == 2
            optimizer.op = hvd.Sum
            assert (optimizer.op, gradient(), gradient()) == (hvd.Sum, 6, 6)
            optimizer.op = hvd.Max
            assert gradient() == 3
            optimizer.op = hvd.Average
            optimizer.gradient_predivide_factor = 0.5
            assert (optimizer.gradient_predivide_factor, gradient()) == (0.5, 2)
            with pytest.raises(ValueError, match="not supported with op != Average"):
                optimizer.op = hvd.Sum
            optimizer.gradient_predivide_factor = 1.0
            optimizer.process_set = pair
            assert (optimizer.process_set, gradient()) == (pair, 2)  # the third rank's 2 is its own
            assert optimizer._requires_update == ({parameter} if pair.included() else set())
            optimizer.process_set = hvd.global_process_set
            optimizer.op = hvd.Sum
            assert gradient() == 6 and optimizer._requires_update == {parameter}

            with pytest.raises(ValueError, match="was not added"):
                optimizer.process_set = hvd.ProcessSet([0, 1])
            with pytest.raises(ValueError, match="can not become Adasum"):
                optimizer.op = hvd.Adasum
            (parameter * (rank + 1)).sum().backward()
            for name, value in (("op", hvd.Average), ("process_set", pair), ("sparse_as_dense", True)):
                with pytest.raises(AssertionError, match=f"{name} was set after loss.backward"):
                    setattr(optimizer, name, value)
            optimizer.op = hvd.Sum  # it is already
            optimizer.step()
            found = optimizer.op, optimizer.process_set, optimizer.sparse_as_dense
            assert found == (hvd.Sum, hvd.global_process_set, False)
            assert gradient() == 6


def test_attributes_that_are_set() -> None:
    run_ranks(_attributes_that_are_set, 3)


def _sparse_as_dense_that_is_set(rank: int, size: int) -> None:
    with horovod() as hvd:
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        for is_dense in (False, True, False):
            optimizer.sparse_as_dense = is_dense
            optimizer.zero_grad()
            embedding(torch.tensor([rank])).sum().backward()
            optimizer.step()
            assert embedding.weight.grad.is_sparse
            expected = torch.tensor([[1 / size] * 2] * size + [[0.0] * 2] * (4 - size))
            assert torch.equal(embedding.weight.grad.to_dense(), expected)


def test_sparse_as_dense_that_is_set() -> None:
    run_ranks(_sparse_as_dense_that_is_set, 2)


def _passes_set_at_any_time(rank: int, size: int) -> None:
    with horovod() as hvd:
        for n_elements, is_attribute in itertools.product((3, LARGE), (False, True)):
            parameter = nn.Parameter(torch.zeros(n_elements))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], op=hvd.Sum)
            for before, after in ((1, 3), (3, 2)):
                optimizer.zero_grad()
                for _ in range(before):
                    (parameter * (rank + 1)).sum().backward()
                if is_attribute:
                    optimizer.backward_passes_per_step = after
                else:
                    optimizer.set_backward_passes_per_step(after)
                optimizer.step()
                assert parameter.grad.eq(before * sum(range(size + 1))).all(), "reduced twice, or not at all"
            (parameter * 0).sum().backward()
            optimizer.set_backward_passes_per_step(1)  # nothing has gone out: one more
            (parameter * 0).sum().backward()
            optimizer.step()
            for bad in (0, -1):
                with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
                    optimizer.backward_passes_per_step = bad
            assert optimizer.backward_passes_per_step == 1


def test_passes_set_at_any_time() -> None:
    run_ranks(_passes_set_at_any_time, 2)


def _synchronizes_by_hand(rank: int, size: int) -> None:
    with horovod() as hvd:
        for n_elements in (3, LARGE):
            parameter = nn.Parameter(torch.zeros(n_elements))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], op=hvd.Sum)
            assert optimizer._should_synchronize is True
            for _ in range(2):
                optimizer.zero_grad()
                (parameter * (rank + 1)).sum().backward()
                optimizer.synchronize()
                optimizer._should_synchronize = False
                optimizer.step()
                assert parameter.grad.eq(sum(range(size + 1))).all(), "reduced twice"
                assert optimizer._should_synchronize is False
                optimizer._should_synchronize = True
            with optimizer.skip_synchronize():
                assert not optimizer._should_synchronize
            optimizer._should_synchronize = False
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer._should_synchronize


def test_should_synchronize() -> None:
    run_ranks(_synchronizes_by_hand, 2)


def _left_alone(rank: int, size: int, passes: int) -> None:
    with horovod() as hvd:
        for n_elements, chosen in itertools.product((3, LARGE), ("all", "none", "one", "cleared")):
            # 0 has gradients everywhere, 1 on one rank, 2 and 3 on none.
            parameters = [nn.Parameter(torch.ones(n_elements)) for _ in range(4)]
            named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5), named, backward_passes_per_step=passes
            )
            assert optimizer._requires_update == set(parameters)
            if chosen == "none":
                optimizer._requires_update = set()
            elif chosen == "one":
                optimizer._requires_update = {parameters[2]}
                assert optimizer._requires_update == {parameters[2]}
            elif chosen == "cleared":
                optimizer._requires_update.clear()
            for _ in range(2):
                optimizer.zero_grad()
                before = [parameter.detach().clone() for parameter in parameters]
                for _ in range(passes):
                    sum(p.sum() for p in parameters[: 2 if rank == 1 else 1]).backward()
                optimizer.step()
                required = {"all": (2, 3), "one": (2,)}.get(chosen, ())
                for number, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
                    if number < 2 or number in required:
                        gradient = passes * (1.0, 1 / size, 0.0, 0.0)[number]
                        torch.testing.assert_close(parameter.grad, torch.full((n_elements,), gradient) + 0.0)
                        torch.testing.assert_close(parameter.detach(), old - gradient - 0.5 * old)
                    else:
                        assert parameter.grad is None and torch.equal(parameter, old)


@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_that_need_no_update(passes: int) -> None:
    run_ranks(_left_alone, 2, passes, timeout=60)


def _required_afterwards(rank: int, size: int) -> None:
    """With parameters that come later: they are as the others."""
    import horon.torch as hvd

    evens = hvd.ProcessSet([0, 2])
    with horovod(process_sets=[evens]):
        for is_required, process_set in itertools.product((True, False), (hvd.global_process_set, evens)):
            used, frozen, added = (nn.Parameter(torch.ones(3)) for _ in range(3))
            frozen.requires_grad_(False)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([used, frozen], lr=1.0), [("used", used), ("frozen", frozen)], process_set=process_set
            )
            takes_part = process_set.included()
            assert optimizer._requires_update == ({used} if takes_part else set())
            if not is_required:
                optimizer._requires_update = set()
            optimizer.add_param_group({"params": [added]})
            frozen.requires_grad_()
            for _ in range(2):
                optimizer.zero_grad()
                used.sum().backward()
                optimizer.step()
                assert used.grad.eq(1).all()
                for one in (frozen, added):
                    assert (one.grad is not None) == (is_required and takes_part)
            if takes_part:
                assert optimizer._requires_update == ({used, frozen, added} if is_required else set())
            for bad in ([], None, {nn.Parameter(torch.ones(3))}):
                with pytest.raises(ValueError, match="_requires_update: expected a set of the optimizer's parameters"):
                    optimizer._requires_update = bad


def test_parameters_that_come_later_need_updates_as_the_others() -> None:
    run_ranks(_required_afterwards, 3)


class _OwnHandles(torch.optim.SGD):
    """One that has a name of Horovod's itself."""

    _groups = "its own"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handles = 0

    def step(self, closure: Any = None) -> Any:
        self._handles += 1
        return super().step(closure)


def _private_names(rank: int, size: int) -> None:
    with horovod() as hvd:
        parameter = nn.Parameter(torch.zeros(3))
        names = "_handles _grad_accs _allreduce_delay _synchronized _compression _groups _p_to_group _group_counts"
        for op, more in ((hvd.Average, ""), (hvd.Adasum, "_should_synchronize _requires_update _starting_models")):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], op=op)
            for name in [*names.split(), *more.split()]:
                assert not hasattr(optimizer, name)
                with pytest.raises(AttributeError, match=f"{name} is a private name .* would change nothing here"):
                    setattr(optimizer, name, {})
            optimizer.anything_else = 3

            another = nn.Parameter(torch.zeros(3))
            own = hvd.DistributedOptimizer(_OwnHandles([another], lr=1.0), [("b", another)], op=op)
            _step(own, another, 1.0)
            assert own._handles == 1 and own._groups == "its own"
            own._groups = 4
            assert own._groups == 4 and not hasattr(own, "_grad_accs")


def test_private_names_that_mean_nothing() -> None:
    run_ranks(_private_names, 2)


def _loaded_beside_a_scheduler(rank: int, size: int) -> None:
    with horovod() as hvd:
        for op in (hvd.Average, hvd.Adasum):
            parameter = nn.Parameter(torch.zeros(3))
            own = torch.optim.SGD([parameter], lr=1.0)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)
            optimizer = hvd.DistributedOptimizer(own, [("a", parameter)], op=op)
            saved = optimizer.state_dict()
            saved["param_groups"][0]["lr"] = 8.0
            optimizer.load_state_dict(saved)
            assert optimizer.param_groups[0]["lr"] == 8.0
            _step(optimizer, parameter, 1.0)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 4.0, "the scheduler has another optimizer's groups"


def test_a_state_is_loaded_beside_a_scheduler_made_before_wrapping() -> None:
    run_ranks(_loaded_beside_a_scheduler, 2)


def _replaced_gradients(rank: int, size: int) -> None:
    with horovod() as hvd:
        mean = sum(range(size)) / size
        for compression in (hvd.Compression.none, hvd.Compression.fp16, _Halves):
            parameters = [nn.Parameter(torch.zeros(n_elements)) for n_elements in (3, LARGE)]
            named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named, compression)
            for _ in range(2):
                for gradient_of in (torch.clone, lambda gradient: None):
                    optimizer.zero_grad()
                    before = [parameter.detach().clone() for parameter in parameters]
                    sum((parameter * rank).sum() for parameter in parameters).backward()
                    for parameter in parameters:
                        parameter.grad = gradient_of(parameter.grad)
                    optimizer.step()
                    for parameter, old in zip(parameters, before, strict=True):
                        assert parameter.grad.eq(mean).all() and parameter.detach().eq(old - mean).all()


class _Halves:
    """A compression of the script's own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor * 2


def test_gradients_replaced_between_backward_and_step() -> None:
    run_ranks(_replaced_gradients, 2)


def _to_and_fro(model: nn.Module) -> None:
    model.bfloat16().float()


def _move_on_rank_0(model: nn.Module) -> None:
    """As model.cpu() and back does on a GPU, to save it."""
    import horon.torch as hvd

    for parameter in model.parameters():
        if hvd.rank() == 0 and parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def _moved_gradients(rank: int, size: int) -> None:
    with horovod() as hvd:
        mean = sum(range(size)) / size
        for set_to_none in (True, False):
            model = nn.Linear(3, 2)
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            for convert in (nn.Module.double, nn.Module.float, _to_and_fro, _move_on_rank_0, nn.Module.train):
                optimizer.zero_grad(set_to_none)
                sum((parameter * rank).sum() for parameter in model.parameters()).backward()
                optimizer.step()
                for parameter in model.parameters():
                    assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
                    assert parameter.grad.eq(mean).all()
                convert(model)


def test_models_converted_after_a_step() -> None:
    run_ranks(_moved_gradients, 2)


def _converted_on_the_way(rank: int, size: int, is_complete: bool) -> None:
    """Between backward() and step(), when the gradients are on their way, or the last of them is missing."""
    with horovod() as hvd:
        mean = sum(range(size)) / size
        for convert in (nn.Module.train, nn.Module.double, _to_and_fro, _move_on_rank_0):
            model = nn.Linear(3, 2)
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            used = list(model.parameters()) if is_complete else [model.bias]
            sum((parameter * (rank + torch.zeros_like(parameter))).sum() for parameter in used).backward()
            assert all(horon.is_in_arena(parameter.grad) for parameter in used), "not packed as soon as it was made"
            convert(model)
            optimizer.step()
            for parameter in model.parameters():
                expected = mean if any(parameter is one for one in used) else 0.0
                assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
                assert parameter.grad.eq(expected).all(), f"{convert.__name__}: {parameter.grad}"


@pytest.mark.parametrize("is_complete", [True, False])
def test_models_converted_between_backward_and_step(is_complete: bool) -> None:
    run_ranks(_converted_on_the_way, 2, is_complete)


def _converted_without_gradients(rank: int, size: int) -> None:
    with horovod() as hvd:
        model = nn.Module()
        model.small = nn.Parameter(torch.zeros(3))
        model.large = nn.Parameter(torch.zeros(LARGE))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for convert in (nn.Module.double, nn.Module.float, nn.Module.train):
            optimizer.zero_grad()
            (model.small.sum() + (model.large.sum() if rank == 0 else 0)).backward()
            optimizer.step()
            for parameter, mean in ((model.small, 1.0), (model.large, 1 / size)):
                assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
                assert parameter.grad.eq(mean).all()
            convert(model)


def test_models_converted_while_a_gradient_is_missing() -> None:
    run_ranks(_converted_without_gradients, 2)
