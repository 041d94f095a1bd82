"""DistributedDataParallel with its gradients in the arena: see docs/arena.md.

Note [Every model]
With HORON_DDP_IN_ARENA=on DDP's constructor does what `ddp_in_arena` does, for models on CPU whose group is horon's. A
communication hook that the caller registers afterwards takes the place of ours, and the model gets the reducer that it
would have had.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from horon import _version_check

_version_check.check()

import torch  # noqa: E402  (after the version check, which gives a clear error)
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from horon import _C  # noqa: E402
from horon._words import is_on  # noqa: E402

kVariable = "HORON_DDP_IN_ARENA"


class _Passes:
    """Forward pre-hooks of a DDP model and of the module in it: the backward pass that follows may make gradients right
    in its buckets, unless DDP will not reduce them (no_sync()): then gradients of the last step that are still held
    stay as they are. Between the two DDP may lay its buckets out anew: the caller's own gradients stay what they are.

    Copies of the model, which have no communication hook, get hooks that do nothing.
    """

    def __init__(self, parts: _C.DdpParts | None = None, own: _C.OwnGradients | None = None) -> None:
        self.parts = parts
        self.own = own
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.is_automatic = False  # in the arena by HORON_DDP_IN_ARENA, and by nothing else

    def begin_forward(self, model: DistributedDataParallel, _: object) -> None:
        if not torch.is_grad_enabled():
            return  # also between two parts of a backward pass
        if self.parts is not None:
            self.parts.set_lending(bool(model.require_backward_grad_sync), not model.static_graph)
        if self.own is not None:
            self.own.begin_forward()

    def end_rebuild(self, *_: object) -> None:
        if self.own is not None:
            self.own.end_rebuild()

    def __reduce__(self) -> tuple[type[_Passes], tuple[()]]:
        return _Passes, ()


def ddp_in_arena(model: DistributedDataParallel) -> DistributedDataParallel:
    """Keeps a DDP model's gradient buckets in the arena, where they are averaged without copies.

    Call it once, right after the model was wrapped. It registers a communication hook, so the model can have no other.
    See docs/arena.md for the side effects. The process group's ranks all have to call it.

    Args:
        model: A ``DistributedDataParallel`` model on CPU whose process group is horon's.

    Returns:
        The same model.

    Raises:
        TypeError: It is no ``DistributedDataParallel`` model.
        ValueError: The model is not on CPU, or its process group is not horon's.
        RuntimeError: Another communication hook is registered.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"horon: ddp_in_arena: expected a DistributedDataParallel model, got {type(model).__name__}.")
    if model.device.type != "cpu":
        raise ValueError(f"horon: ddp_in_arena: the model is on {model.device}; only CPU models have arena buckets.")
    if not _is_horon(model.process_group):
        name = dist.get_backend(model.process_group)
        raise ValueError(f"horon: ddp_in_arena: the model's process group uses {name}; init it with 'horon'.")
    if _is_automatic(model):
        return model
    gradients = _kind_of_gradients(model)
    own = None
    if gradients == _C.DdpGradients.OWN:
        # Fails where the model has another hook.
        _C.register_ddp_arena_hook(model.reducer, model.process_group, _C.DdpGradients.COPIED, None)
        own = _C.OwnGradients(_parameters_of(model)[0])
        own.watch()
        _make_reducer(model, gradient_as_bucket_view=True)
        _with_own_gradients.add(model)
    parts = _C.register_ddp_arena_hook(model.reducer, model.process_group, gradients, own)
    if gradients != _C.DdpGradients.COPIED:
        passes = _Passes(parts, own)
        passes.handles.append(model.register_forward_pre_hook(passes.begin_forward))
        if own is not None:
            passes.handles.append(model.module.register_forward_pre_hook(_EndsRebuild(passes)))
    _copy_where_shared(model)
    return model


_with_own_gradients: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _copy_where_shared(model: DistributedDataParallel) -> None:
    """Gradients of other models that have a parameter in common with this one are copied from now on."""
    parameters = set(model.parameters())
    for other in list(_with_own_gradients):
        if other is not model and not parameters.isdisjoint(other.parameters()):
            is_automatic = _is_automatic(other)
            _take_out(other)
            if not is_automatic:
                _C.register_ddp_arena_hook(other.reducer, other.process_group, _C.DdpGradients.COPIED, None)


def _take_out(model: DistributedDataParallel) -> None:
    """Gives the model the reducer that it would have had."""
    passes = _passes_of(model)
    if passes is not None:
        for handle in passes.handles:
            handle.remove()
        _with_own_gradients.discard(model)
        _make_reducer(model, model.gradient_as_bucket_view)


class _EndsRebuild:
    """Of a module that may outlive its DDP model."""

    def __init__(self, passes: _Passes | None = None) -> None:
        self.passes = weakref.ref(passes) if passes is not None else lambda: None

    def __call__(self, *_: object) -> None:
        passes = self.passes()
        if passes is not None:
            passes.end_rebuild()

    def __reduce__(self) -> tuple[type[_EndsRebuild], tuple[()]]:
        return _EndsRebuild, ()


def _parameters_of(model: DistributedDataParallel) -> tuple[list[torch.Tensor], list[bool]]:
    """Those that DDP reduces, and whether each has sparse gradients."""
    ddp: Any = model  # its private methods have no types
    parameters, are_sparse = ddp._build_params_for_reducer()
    return list(parameters), list(are_sparse)


def _kind_of_gradients(model: DistributedDataParallel) -> _C.DdpGradients:
    if model.gradient_as_bucket_view:
        return _C.DdpGradients.VIEWS
    parameters, are_sparse = _parameters_of(model)
    # What ends a backward pass elsewhere, or has other buckets.
    special = (
        model.static_graph,
        any(are_sparse),
        _C.OwnGradients.are_shared(parameters),
        model.mixed_precision,
        model._use_python_reducer,
        model._delay_all_reduce_params,
        model.skip_all_reduce_unused_params,
        getattr(model, "batched_grad_copy", False),
        getattr(model, "lazy_bucket_allocation", False),
        getattr(model, "_require_manual_backward_finalization", False),
    )
    return _C.DdpGradients.COPIED if any(special) else _C.DdpGradients.OWN


def _make_reducer(model: DistributedDataParallel, gradient_as_bucket_view: bool) -> None:
    """Gives the model another reducer, as unpickling does."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    ddp: Any = model  # its private methods have no types
    parameters, are_sparse = _parameters_of(model)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    shown = model.gradient_as_bucket_view
    model.gradient_as_bucket_view = gradient_as_bucket_view
    try:
        ddp._ddp_init_helper(parameters, are_sparse, names, model.static_graph)
    finally:
        model.gradient_as_bucket_view = shown
    if model.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for parameter, gradient in before:
        parameter.grad = gradient


def _is_horon(group: Any) -> bool:
    """Not by its name, which may be Gloo's (HORON_INSTEAD_OF_GLOO); torch's debug mode puts a wrapper around it."""
    backend = group._get_backend(torch.device("cpu"))
    return isinstance(getattr(backend, "wrapped_pg", backend), _C.HoronBackend)


def install(environment: Mapping[str, str]) -> None:
    """Does what ``HORON_DDP_IN_ARENA`` says; see Note [Every model].

    Raises:
        ValueError: It says neither yes nor no.
    """
    ddp: Any = DistributedDataParallel
    if is_on(environment, kVariable) and not hasattr(ddp.__init__, "_is_horons"):
        ddp.__init__ = _then_in_arena(ddp.__init__)
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            setattr(ddp, name, _out_of_arena_before(getattr(ddp, name)))


def _then_in_arena(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(model, *args, **kwargs)
        if model.device.type != "cpu" or not _is_horon(model.process_group):
            return
        if _kind_of_gradients(model) == _C.DdpGradients.COPIED:
            _copy_where_shared(model)
            return
        passes = _passes_of(ddp_in_arena(model))
        assert passes is not None
        passes.is_automatic = True

    __init__._is_horons = True  # type: ignore[attr-defined]
    return __init__


def _out_of_arena_before(register: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(register)
    def register_hook(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if _is_automatic(model):
            _take_out(model)
        register(model, *args, **kwargs)

    return register_hook


def _is_automatic(model: DistributedDataParallel) -> bool:
    passes = _passes_of(model)
    return passes is not None and passes.is_automatic


def _passes_of(model: DistributedDataParallel) -> _Passes | None:
    """None for copies."""
    hooks = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
    return next((hook for hook in hooks if isinstance(hook, _Passes) and hook.parts is not None), None)
