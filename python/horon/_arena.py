"""Tensors in this process's arena: see docs/arena.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from horon import _version_check

_version_check.check()

import torch  # noqa: E402  (after the version check, which gives a clear error)
import torch.distributed as dist  # noqa: E402

from horon import _C  # noqa: E402

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """An uninitialised CPU tensor in the arena, like ``torch.empty``.

    Collectives on it need no copies where all ranks use such tensors; elsewhere it is an ordinary tensor.

    Args:
        size: Numbers, or one sequence of them.
        dtype: Default: ``torch.get_default_dtype()``.
        requires_grad: As in ``torch.empty``.

    Raises:
        torch.OutOfMemoryError: The budget is spent, or the system is short of memory.
        ValueError: The arena is off (``HORON_ARENA_BYTES=0``).
    """
    tensor = _C.empty_in_arena(_sizes(size), dtype or torch.get_default_dtype())
    return tensor.requires_grad_() if requires_grad else tensor


def _sizes(size: tuple[int | Sequence[int], ...]) -> list[int]:
    if len(size) == 1 and not isinstance(size[0], int):
        return list(size[0])
    return list(size)  # type: ignore[arg-type]  # C++ checks that they are numbers


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Like :func:`empty`, filled with zeros."""
    tensor = empty(*size, dtype=dtype).zero_()
    return tensor.requires_grad_() if requires_grad else tensor


def empty_like(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """An uninitialised tensor in the arena with size and layout of another CPU tensor, like ``torch.empty_like``.

    Raises: as :func:`empty`.
    """
    like = _C.empty_like_in_arena(tensor, dtype)
    return like.requires_grad_() if requires_grad else like


def is_in_arena(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory lies in this process's arena. False for tensors without elements."""
    return _C.is_in_arena(tensor)


def arena_statistics() -> dict[str, int]:
    """Numbers of bytes: ``budget_bytes``, ``used_bytes`` (by tensors), ``reserved_bytes`` (memory taken from the
    system), ``quarantined_bytes`` (lost to operations that failed; part of ``used_bytes``)."""
    return _C.arena_statistics()


class _Passes:
    """A forward pre-hook and a forward hook of a DDP model: the backward pass that follows may make gradients right in
    its buckets, unless DDP will not reduce them (no_sync()): then gradients of the last step that are still held stay
    as they are. Gradients of the caller's own stay what they are when DDP lays its buckets out anew.

    Copies of the model, which have no communication hook, get hooks that do nothing.
    """

    def __init__(self, parts: _C.DdpParts | None = None, own: _C.OwnGradients | None = None) -> None:
        self.parts = parts
        self.own = own

    def begin_forward(self, model: DistributedDataParallel, _: object) -> None:
        if self.parts is not None and torch.is_grad_enabled():
            self.parts.set_lending(bool(model.require_backward_grad_sync), not model.static_graph)
        if self.own is not None:
            self.own.begin_forward()

    def end_forward(self, *_: object) -> None:
        if self.own is not None:
            self.own.end_forward()

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
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"horon: ddp_in_arena: expected a DistributedDataParallel model, got {type(model).__name__}.")
    if model.device.type != "cpu":
        raise ValueError(f"horon: ddp_in_arena: the model is on {model.device}; only CPU models have arena buckets.")
    if not _is_horon(model.process_group):
        name = dist.get_backend(model.process_group)
        raise ValueError(f"horon: ddp_in_arena: the model's process group uses {name}; init it with 'horon'.")
    gradients = _kind_of_gradients(model)
    parameters: list[torch.Tensor] = []
    if gradients == _C.DdpGradients.OWN:
        # Fails where the model has another hook.
        _C.register_ddp_arena_hook(model.reducer, model.process_group, _C.DdpGradients.COPIED, [])
        parameters = _make_reducer_with_views(model)
    parts, own = _C.register_ddp_arena_hook(model.reducer, model.process_group, gradients, parameters)
    if gradients != _C.DdpGradients.COPIED:
        passes = _Passes(parts, own)
        model.register_forward_pre_hook(passes.begin_forward)
        model.register_forward_hook(passes.end_forward, always_call=True)
    return model


def _kind_of_gradients(model: DistributedDataParallel) -> _C.DdpGradients:
    if model.gradient_as_bucket_view:
        return _C.DdpGradients.VIEWS
    # What ends a backward pass elsewhere, or buckets that come and go.
    special = (
        model.mixed_precision,
        model._use_python_reducer,
        model._delay_all_reduce_params,
        model.skip_all_reduce_unused_params,
        getattr(model, "batched_grad_copy", False),
        getattr(model, "lazy_bucket_allocation", False),
        getattr(model, "_require_manual_backward_finalization", False),
    )
    return _C.DdpGradients.COPIED if any(special) else _C.DdpGradients.OWN


def _make_reducer_with_views(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Gives the model another reducer, as unpickling does, but with gradient_as_bucket_view=True. Returns the
    parameters whose gradients it reduces."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    parameters, expect_sparse_gradient = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model.gradient_as_bucket_view = True
    try:
        model._ddp_init_helper(parameters, expect_sparse_gradient, names, model.static_graph)
    finally:
        model.gradient_as_bucket_view = False
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for parameter, gradient in before:
        parameter.grad = gradient
    return list(parameters)


def _is_horon(group: Any) -> bool:
    """Not by its name, which may be Gloo's (HORON_INSTEAD_OF_GLOO); torch's debug mode puts a wrapper around it."""
    backend = group._get_backend(torch.device("cpu"))
    return isinstance(getattr(backend, "wrapped_pg", backend), _C.HoronBackend)
