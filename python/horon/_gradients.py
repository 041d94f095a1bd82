"""Gradients in the arena for training loops without DistributedDataParallel: see docs/arena.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from horon import _arena

# Views start on cache lines.
_ALIGNMENT_BYTES = 64


@dataclass
class _Flat:
    """The gradients of one dtype, one after another, and one number per parameter that says whether it has one."""

    buffer: torch.Tensor
    parameters: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    has_gradient: torch.Tensor


class SharedGradients:
    """The gradients of a model, kept in the arena. Made by :func:`share_gradients`."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if parameter.device.type != "cpu" or parameter.layout != torch.strided:
                    raise ValueError(
                        f"horon: share_gradients: parameter {name!r} is not a dense CPU tensor "
                        f"(device {parameter.device}, layout {parameter.layout})."
                    )
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._flats = [self._make_flat(dtype, parameters) for dtype, parameters in by_dtype.items()]

    def _make_flat(self, dtype: torch.dtype, parameters: list[torch.nn.Parameter]) -> _Flat:
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        offsets = [0]
        for parameter in parameters:
            offsets.append(offsets[-1] + -(-parameter.numel() // unit) * unit)
        buffer = _arena.zeros(offsets[-1] + len(parameters), dtype=dtype)
        views = []
        for parameter, offset in zip(parameters, offsets, strict=False):
            part = buffer[offset : offset + parameter.numel()]
            # The layout that autograd gives gradients, so that it accumulates into the view.
            strides = torch.empty_like(parameter, device="meta").stride()
            views.append(part.as_strided(parameter.size(), strides))
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_Mover(view)))  # type: ignore[no-untyped-call]
        return _Flat(buffer, parameters, views, buffer[offsets[-1] :])

    @torch.no_grad()
    def average(self) -> None:
        """Replaces every gradient by its average over the ranks: one all_reduce for each dtype.

        All ranks have to call it. A parameter without a gradient counts as zero if it has one on another rank, and
        stays without where no rank has one.
        """
        for flat in self._flats:
            flat.has_gradient.fill_(1)
            missing = []
            for i, parameter in enumerate(flat.parameters):
                if parameter.grad is None:
                    flat.views[i].zero_()
                    flat.has_gradient[i] = 0
                    missing.append(i)
                elif parameter.grad is not flat.views[i]:  # the user's own tensor
                    flat.views[i].copy_(parameter.grad)
                    parameter.grad = flat.views[i]
            dist.all_reduce(flat.buffer, dist.ReduceOp.AVG, group=self._group)
            for i in missing:
                if flat.has_gradient[i] != 0:  # another rank has one
                    flat.parameters[i].grad = flat.views[i]

    def remove(self) -> None:
        """Takes the hooks off the model; its gradients become ordinary with the next backward pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Mover:
    """Post-accumulate hook: moves a new gradient into its place in the arena."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not self._view and gradient is not None:
            self._check(gradient)
            with torch.no_grad():
                self._view.copy_(gradient)
            parameter.grad = self._view

    def _check(self, gradient: torch.Tensor) -> None:
        place = self._view
        if gradient.requires_grad:
            raise RuntimeError(
                "horon: share_gradients: a gradient with a graph of its own (create_graph=True) would lose it in its "
                "place in the arena; use torch.autograd.grad() for it."
            )
        expected, got = ((t.dtype, t.layout, tuple(t.shape)) for t in (place, gradient))
        if expected != got:
            raise RuntimeError(
                f"horon: share_gradients: expected a gradient of {expected}, got {got} (dtype, layout, shape). It "
                "needs dense gradients (sparse=False); for a model that has changed since, call remove() and "
                "share_gradients() again."
            )


def share_gradients(model: torch.nn.Module, *, group: dist.ProcessGroup | None = None) -> SharedGradients:
    """Keeps the gradients of a model in the arena, for training without DistributedDataParallel::

        gradients = horon.share_gradients(model)
        for x, y in batches:
            loss(model(x), y).backward()
            gradients.average()
            optimizer.step()
            optimizer.zero_grad()

    The parameters have to be equal on all ranks at the beginning (broadcast them, or use one seed).

    Args:
        model: All of its parameters that require gradients must be dense CPU tensors.
        group: Over which to average; default: the default group.

    Raises:
        ValueError: A parameter is elsewhere, or the arena is off.
        torch.OutOfMemoryError: The gradients do not fit into the arena.
    """
    return SharedGradients(model, group)
