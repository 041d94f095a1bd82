"""The DistributedOptimizer: any torch.optim optimizer, on gradients reduced over the ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from horon.common import basics
from horon.common._reduce_ops import Adasum, Average, Max
from horon.common.process_sets import ProcessSet, global_process_set
from horon.common.util import num_rank_is_power_2
from horon.torch._adasum_optimizer import (
    NOT_COPIED,
    AdasumOptimizer,
    divide_by_need,
    keep_groups,
    name_last_group,
)
from horon.torch._allreduce import allreduce, allreduce_
from horon.torch._gradient_reducer import GradientReducer, Groups, ReductionOptions
from horon.torch._issue import id_of
from horon.torch._private_names import names_not_written
from horon.torch.compression import Compression, Compressor

Closure = Callable[[], Any]


class _Option:
    """An attribute of a DistributedOptimizer that was an argument of it. It may be set, on all ranks alike.

    Gradients are reduced with the new value from the next backward pass on (Horovod reads its attributes whenever it
    sends a gradient). A descriptor, since a __setattr__ would slow down every attribute that step() sets.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self if optimizer is None else getattr(optimizer._horon_options, self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer._horon_set_option(self._name, value)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What a DistributedOptimizer adds to the optimizer's own class. Made by :func:`_make`."""

    _horon_reducer: GradientReducer | None
    """None where nothing needs to be sent: alone, or outside of the process set."""
    _horon_options: ReductionOptions
    _horon_frozen: list[tuple[str, torch.Tensor]]
    """Parameters that need no gradients yet; see Note [Parameters that are unfrozen]."""
    _horon_passes: int
    _parameter_names: dict[torch.Tensor, str]
    """Horovod's name for it, which scripts read."""
    _horon_is_synchronized: bool
    _horon_synchronizes_in_step: bool
    _horon_required: set[torch.Tensor] | None
    """See _requires_update; None until a script has looked at it or set it."""
    _horon_sets_to_none: bool
    """What the optimizer's own zero_grad() does when it is called without arguments."""
    op = _Option()
    gradient_predivide_factor = _Option()
    sparse_as_dense = _Option()
    process_set = _Option()

    def _horon_set_option(self, name: str, value: Any) -> None:
        """Sets one of the options above.

        Raises:
            AssertionError: Between backward() and step() or synchronize().
            ValueError: The options do not go together; op=Adasum; a process set that was not added.
        """
        if value == getattr(self._horon_options, name):
            return
        self._horon_refuse_in_flight(f"optimizer.{name} was set")
        options = replace(self._horon_options, **{name: value})
        _check_options(options)
        if options.op == Adasum and basics.size() > 1:
            raise ValueError(
                "horon: optimizer.op can not become Adasum, which combines the steps instead of the gradients. "
                "Make another hvd.DistributedOptimizer with op=hvd.Adasum."
            )
        id_of(options.process_set)  # raises unless it was added
        if name == "process_set":
            self._horon_required = None  # other ranks take part, which have all of them required
        self._horon_options = options
        self._horon_start_reducer()

    def _horon_start_reducer(self) -> None:
        """Makes what reduces the gradients, with the options as they are now; None where nothing needs to be sent."""
        self._horon_reducer = None  # takes its hooks off, before the new one's come
        options = self._horon_options
        if options.process_set.included() and basics.size() > 1 and options.process_set.size() != 1:
            named = [(name, parameter) for parameter, name in self._parameter_names.items()]
            self._horon_reducer = GradientReducer(named, self._horon_passes, options)

    def _horon_refuse_in_flight(self, what: str) -> None:
        if self._has_gradients():
            raise AssertionError(
                f"{what} after loss.backward() but before optimizer.step() or optimizer.synchronize(), while gradients "
                "are on their way."
            )

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before gradients go out. To set it is to call set_backward_passes_per_step()."""
        return self._horon_passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def _should_synchronize(self) -> bool:
        """Horovod's name for what skip_synchronize() sets to False: whether step() synchronizes."""
        return self._horon_synchronizes_in_step

    @_should_synchronize.setter
    def _should_synchronize(self, synchronizes: bool) -> None:
        self._horon_synchronizes_in_step = bool(synchronizes)

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """Horovod's name for the parameters that get zeros where their gradient is missing; none where nothing is sent.

        Scripts set it to an empty set. Those that are not in it are left alone as long as their ``.grad`` is None on
        all ranks. All ranks have to set the same.

        Raises:
            ValueError: When it is set to anything but a set of the optimizer's parameters.
        """
        if self._horon_required is None:
            self._horon_required = set(self._parameter_names) if self._horon_reducer is not None else set()
        return self._horon_required

    @_requires_update.setter
    def _requires_update(self, parameters: set[torch.Tensor]) -> None:
        own = {parameter for group in self.param_groups for parameter in group["params"]}
        if not isinstance(parameters, set) or not parameters <= own:
            raise ValueError("horon: optimizer._requires_update: expected a set of the optimizer's parameters.")
        self._horon_required = parameters

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes come before step() or synchronize(). Gradients on their way are not changed.

        Raises:
            ValueError: passes <= 0.

        Source: Horovod 0.28.1 ``set_backward_passes_per_step``.
        """
        passes = _checked_passes(passes)
        self._horon_passes = passes
        if self._horon_reducer is not None:
            self._horon_reducer.set_passes(passes)

    def synchronize(self) -> None:
        """Blocks until all gradients are reduced; those that were not computed count as zeros.

        To clip gradients, or to look at them: call it after backward(), and step() within skip_synchronize().

        Raises:
            HorovodInternalError: Ranks disagree about the parameters, or one was lost.

        Source: Horovod 0.28.1 ``synchronize``.
        """
        if self._horon_reducer is not None:
            missing = self._horon_missing() if self._horon_leaves_some_alone() else None
            self._horon_reducer.synchronize()
            if self._horon_frozen:
                self._horon_take_unfrozen()
            if missing:
                self._horon_leave_alone(missing)
        self._horon_is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A with block in which step() does not synchronize, because synchronize() was called already.

        Source: Horovod 0.28.1 ``skip_synchronize``.
        """
        self._horon_synchronizes_in_step = False
        try:
            yield
        finally:
            self._horon_synchronizes_in_step = True

    def step(self, closure: Closure | None = None) -> Any:
        """Waits for the gradients, then takes the optimizer's step.

        Args:
            closure: Computes the gradients and returns the loss; they are reduced each time after it ran. Those that
                are there already are reduced before. For LBFGS the loss is averaged as well, since its search depends
                on it.

        Source: Horovod 0.28.1 ``step`` (which reduces before a closure runs, and not after).
        """
        if self._horon_synchronizes_in_step:
            if closure is not None:
                closure = self._with_synchronize(closure)
            else:
                if self._horon_is_synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after "
                        "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                        "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                        stacklevel=2,
                    )
                self.synchronize()
        result = super().step() if closure is None else super().step(closure)
        self._horon_is_synchronized = False
        return result

    # torch wraps the step of each class in a profiler range and hooks; the class below this one has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def _with_synchronize(self, closure: Closure) -> Closure:
        were_there = self._has_gradients()
        if were_there:
            self.synchronize()

        def synchronized() -> Any:
            loss = closure()
            # Those that were there are not reduced twice if the closure has only looked at them.
            if not were_there or self._has_gradients():
                self.synchronize()
            if isinstance(self, torch.optim.LBFGS) and self._horon_reducer is not None:
                loss = allreduce(torch.as_tensor(loss).detach(), process_set=self._horon_reducer.process_set)
            return loss

        return synchronized

    def _has_gradients(self) -> bool:
        return self._horon_reducer is not None and self._horon_reducer.has_gradients

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets the gradients, as the optimizer's own.

        Args:
            args: As the optimizer's own, as a rule ``set_to_none``: whether ``.grad`` becomes None, or zeros (which
                then stay in the arena).
            kwargs: The same.

        Raises:
            AssertionError: Between backward() and step() or synchronize().

        Source: Horovod 0.28.1 ``zero_grad``.
        """
        reducer = self._horon_reducer
        if reducer is not None:
            if reducer.has_gradients:
                raise AssertionError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            set_to_none = kwargs.get("set_to_none", args[0] if args else self._horon_sets_to_none)
            if not set_to_none:
                reducer.zero_in_place()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the group's gradients are reduced from now on, like the others.

        All ranks have to add the same. The parameters' names are made of their numbers.

        Raises:
            AssertionError: Between backward() and step() or synchronize().

        Horovod 0.28.1 steps on a new group's own gradients, unreduced, so that ranks part without a word.
        """
        self._horon_refuse_in_flight("optimizer.add_param_group() was called")
        super().add_param_group(param_group)
        added, frozen = divide_by_need(name_last_group(self))
        self._horon_frozen += frozen
        self._horon_reduce_also(added)

    # Note [Parameters that are left alone]
    # Zeros are no missing gradient: with weight decay or momentum, parameters change. A rank knows only its gradients,
    # though, and one that leaves a parameter alone on which others step would part from them. So after the reduction,
    # in which missing gradients have counted as zeros, the ranks ask which ones were missing everywhere.
    def _horon_leaves_some_alone(self) -> bool:
        return self._horon_required is not None and not self._horon_required.issuperset(self._parameter_names)

    def _horon_missing(self) -> dict[torch.Tensor, bool]:
        """Whether the gradient is missing on this rank, of each parameter that may be left alone."""
        unfrozen, _ = divide_by_need(self._horon_frozen)
        candidates = [*self._parameter_names, *(parameter for _, parameter in unfrozen)]
        return {p: p.grad is None for p in candidates if p not in self._requires_update}

    def _horon_leave_alone(self, missing: dict[torch.Tensor, bool]) -> None:
        is_there = torch.tensor([not is_missing for is_missing in missing.values()], dtype=torch.uint8)
        name = self._parameter_names[next(iter(missing))]
        allreduce_(is_there, name=f"has_gradient.{name}", op=Max, process_set=self.process_set)
        for parameter, is_anywhere in zip(missing, is_there.tolist(), strict=True):
            if not is_anywhere:
                parameter.grad = None

    # Note [Parameters that are unfrozen]
    # Fine-tuning sets requires_grad during the training. What needed no gradients when it was wrapped has no hooks, and
    # would train on each rank's own. So synchronize() looks at those parameters, if any: gradients that have come
    # meanwhile are reduced on the spot, and in the next backward pass go out like the others.
    def _horon_take_unfrozen(self) -> None:
        unfrozen, self._horon_frozen = divide_by_need(self._horon_frozen)
        if unfrozen:
            GradientReducer(unfrozen, self._horon_passes, self._horon_options).synchronize()
            self._horon_reduce_also(unfrozen)

    def _horon_reduce_also(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self._horon_required is not None and not self._horon_leaves_some_alone():
            self._horon_required.update(parameter for _, parameter in named)
        self._parameter_names.update((parameter, name) for name, parameter in named)
        if self._horon_reducer is not None:
            self._horon_start_reducer()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_COPIED)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; gradients in flight are forgotten. Source: Horovod 0.28.1 ``load_state_dict``."""
        if self._horon_reducer is not None:
            self._horon_reducer.reset()
        self._horon_is_synchronized = False
        self._horon_synchronizes_in_step = True
        groups = self.param_groups
        super().load_state_dict(*args, **kwargs)
        self.param_groups = keep_groups(groups, self.param_groups)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that it steps on gradients reduced over the ranks.

    Gradients go out while the backward pass goes on, in place; step() waits for them. The result is of a subclass of
    the optimizer's class and shares its parameter groups and its state; use it instead of the old one from now on.
    Besides the optimizer's methods it has synchronize(), skip_synchronize() and set_backward_passes_per_step(). To
    clip gradients::

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        with optimizer.skip_synchronize():
            optimizer.step()

    and so with a GradScaler: synchronize(), ``scaler.unscale_(optimizer)``, then ``scaler.step(optimizer)`` within
    skip_synchronize().

    Args:
        optimizer: Any torch.optim.Optimizer.
        named_parameters: ``model.named_parameters()``: all of the optimizer's parameters with their names, the same on
            all ranks. Without it they are named by their numbers.
        compression: What gradients go through on their way: Compression.none, .fp16, .bf16, or a Compressor.
        backward_passes_per_step: Backward passes that add up before gradients go out.
        op: Average, Sum, Min, Max, Product, or Adasum (which reduces the steps instead of the gradients).
        gradient_predivide_factor: With Average: divide by it before the sum, and by size / factor after it.
        num_groups: Deprecated: ``groups``.
        groups: Gradients to send together: lists of parameters, or the number of lists to make. By default large ones
            go by themselves, and small ones in lists of about 1 MiB.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones (and are sparse again afterwards), not
            gathered.
        process_set: The ranks that take part; on others, the optimizer steps on their own gradients.

    Raises:
        ValueError: Names that are not unique, parameters without a name, entries that are no (name, parameter) pairs;
            backward_passes_per_step <= 0; a predivide factor with an op other than Average; bad groups; not
            initialised.
        NotImplementedError: Adasum with a process set, or with a number of ranks that is no power of two.

    Source: Horovod 0.28.1 ``DistributedOptimizer``.
    """
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    options = ReductionOptions(compression, op, gradient_predivide_factor, groups, sparse_as_dense, process_set)
    _check_options(options)
    passes = _checked_passes(backward_passes_per_step)
    _check_groups(groups)
    named, frozen = divide_by_need(_name_all(optimizer, named_parameters))
    if op == Adasum and basics.size() > 1:
        if process_set != global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if not num_rank_is_power_2(basics.size()):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
        return _make(AdasumOptimizer, optimizer)._horon_start(named, frozen, compression, passes)
    wrapped = _make(_DistributedOptimizer, optimizer)
    wrapped._horon_passes = passes
    wrapped._parameter_names = {parameter: name for name, parameter in named}
    wrapped._horon_frozen = frozen
    wrapped._horon_is_synchronized = False
    wrapped._horon_synchronizes_in_step = True
    wrapped._horon_required = None
    wrapped._horon_sets_to_none = _sets_to_none(type(optimizer))
    wrapped._horon_options = options
    wrapped._horon_start_reducer()
    return wrapped


def _check_options(options: ReductionOptions) -> None:
    if options.gradient_predivide_factor != 1.0 and options.op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def _checked_passes(passes: float) -> int:
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if int(passes) != passes:
        raise ValueError(f"backward_passes_per_step must be a whole number, got {passes}")
    return int(passes)


def _sets_to_none(own: type[torch.optim.Optimizer]) -> bool:
    """Whether zero_grad() makes gradients None as far as one can see: some optimizers have a zero_grad of their own."""
    set_to_none = inspect.signature(own.zero_grad).parameters.get("set_to_none")
    return set_to_none is None or bool(set_to_none.default)


def _make(added: type[Any], optimizer: torch.optim.Optimizer) -> Any:
    """An object of a new class, `added` on top of the optimizer's, that shares groups, state and hooks with it.

    The optimizer's constructor is not called: it may want more than parameters, or refuse some of them.
    """
    own = type(optimizer)
    refused = names_not_written(optimizer, is_adasum=added is AdasumOptimizer)
    cls = type(own.__name__, (added, own), {"__module__": __name__, **refused})
    wrapped: Any = object.__new__(cls)
    # A learning rate scheduler puts a step of its own into the instance, which would go past ours.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
    return wrapped


def _name_all(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names, in the order of `named_parameters`.

    The optimizer's own order, which its groups may have from sets, need not be the same on all ranks.
    """
    all_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        given = [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    else:
        given = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in given]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(duplicates)
        )
    name_of = {parameter: name for name, parameter in given}
    unnamed = [id(parameter) for parameter in all_parameters if parameter not in name_of]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(map(str, unnamed))
        )
    is_optimized = set(all_parameters)
    return [(name, parameter) for parameter, name in name_of.items() if parameter in is_optimized]


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, int) and groups > 0:
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if any(isinstance(group, torch.Tensor) for group in groups):
        raise ValueError("groups must be a list of lists of torch.Tensor, got a tensor in the place of a list.")
    seen: set[torch.Tensor] = set()
    for parameter in (parameter for group in cast("Sequence[Any]", groups) for parameter in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if parameter in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(parameter)


__all__ = ["DistributedOptimizer", "Groups"]
