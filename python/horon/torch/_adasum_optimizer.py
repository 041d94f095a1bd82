"""The DistributedOptimizer for Adasum, which combines the ranks' steps instead of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from horon.common._context import default_context
from horon.common._reduce_ops import Adasum
from horon.torch._gradient_parts import new_buffer
from horon.torch.compression import Compressor

NOT_COPIED = (
    "horon: a DistributedOptimizer can not be copied or pickled: it has hooks on the parameters, and operations under "
    "way. Keep optimizer.state_dict(), and load it into a new hvd.DistributedOptimizer."
)


Named = list[tuple[str, torch.Tensor]]


def name_last_group(optimizer: torch.optim.Optimizer) -> Named:
    """Names for the parameters of the group that was added last."""
    number = len(optimizer.param_groups) - 1
    added = optimizer.param_groups[number]["params"]
    return [(f"allreduce.noname.{number}.{j}", parameter) for j, parameter in enumerate(added)]


def divide_by_need(named: Named) -> tuple[Named, Named]:
    """Parameters that need gradients, and those that need none (now)."""
    return [one for one in named if one[1].requires_grad], [one for one in named if not one[1].requires_grad]


def keep_groups(old: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old parameter groups with what a loaded state_dict has put into new ones.

    The optimizer that was wrapped has them, too, and an LR scheduler made before wrapping sets the rate there.
    """
    for group, new in zip(old, loaded, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    return old


class AdasumOptimizer(torch.optim.Optimizer):
    """What it adds to the optimizer's own class: every rank steps for itself, on its own gradients; the differences are
    combined by Adasum, tensor by tensor, and added to where all started.

    Source: Horovod 0.28.1 ``_DistributedAdasumOptimizer``.
    """

    _horon_parameters: Named
    _horon_frozen: Named
    _horon_starts: list[torch.Tensor]
    _horon_deltas: list[torch.Tensor]
    _horon_compression: type[Compressor]
    backward_passes_per_step: int

    def _horon_start(
        self, named_parameters: Named, frozen: Named, compression: type[Compressor], passes: int
    ) -> AdasumOptimizer:
        self._horon_parameters = named_parameters
        self._horon_frozen = frozen
        self._horon_starts = [torch.empty_like(p, requires_grad=False) for _, p in named_parameters]
        self._horon_deltas = [new_buffer(p.numel(), p.dtype, p.device).view(p.shape) for _, p in named_parameters]
        self._horon_compression = compression
        self.backward_passes_per_step = passes
        return self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the group's steps are combined from now on. All ranks have to add the same."""
        super().add_param_group(param_group)
        self._horon_frozen = [*self._horon_frozen, *name_last_group(self)]
        self._take_unfrozen()

    def _take_unfrozen(self) -> None:
        unfrozen, frozen = divide_by_need(self._horon_frozen)
        if unfrozen:
            parameters = [*self._horon_parameters, *unfrozen]
            self._horon_start(parameters, frozen, self._horon_compression, self.backward_passes_per_step)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own."""
        groups = self.param_groups
        super().load_state_dict(*args, **kwargs)
        self.param_groups = keep_groups(groups, self.param_groups)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_COPIED)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing goes out before step(), so that any number of passes may add up."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: gradients are not reduced."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises AssertionError, as in Horovod."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the optimizer's own step, then combines the ranks' steps.

        Raises:
            HorovodInternalError: Ranks disagree about the parameters, or one was lost.
        """
        if self._horon_frozen:  # as in Note [Parameters that are unfrozen]
            self._take_unfrozen()
        parameters = [parameter for _, parameter in self._horon_parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._horon_starts, parameters)
        loss = super().step() if closure is None else super().step(closure)
        with torch.no_grad():
            self._combine(parameters)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see _DistributedOptimizer.step

    def _combine(self, parameters: list[torch.Tensor]) -> None:
        engine = default_context.engine
        in_flight = []
        for (name, parameter), start, delta in zip(
            self._horon_parameters, self._horon_starts, self._horon_deltas, strict=True
        ):
            torch.sub(parameter, start, out=delta)
            sent, ctx = self._horon_compression.compress(delta)
            handle = engine.allreduce([sent], [sent], [f"allreduce.{name}"], Adasum, 1.0, 1.0, 0)
            in_flight.append((handle, sent, ctx))
        for parameter, start, (handle, sent, ctx) in zip(parameters, self._horon_starts, in_flight, strict=True):
            engine.wait(handle)
            torch.add(start, self._horon_compression.decompress(sent, ctx), out=parameter)
