"""The DistributedOptimizer for Adasum, which combines the ranks' steps instead of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from horon.common._context import default_context
from horon.common._reduce_ops import Adasum
from horon.torch._gradient_parts import new_buffer
from horon.torch.compression import Compressor


class AdasumOptimizer(torch.optim.Optimizer):
    """What it adds to the optimizer's own class: every rank steps for itself, on its own gradients; the differences are
    combined by Adasum, tensor by tensor, and added to where all started.

    Source: Horovod 0.28.1 ``_DistributedAdasumOptimizer``.
    """

    _horon_parameters: Sequence[tuple[str, torch.Tensor]]
    _horon_starts: list[torch.Tensor]
    _horon_deltas: list[torch.Tensor]
    _horon_compression: type[Compressor]
    backward_passes_per_step: int

    def _horon_start(
        self, named_parameters: Sequence[tuple[str, torch.Tensor]], compression: type[Compressor], passes: int
    ) -> AdasumOptimizer:
        self._horon_parameters = named_parameters
        self._horon_starts = [torch.empty_like(p, requires_grad=False) for _, p in named_parameters]
        self._horon_deltas = [new_buffer(p.numel(), p.dtype, p.device).view(p.shape) for _, p in named_parameters]
        self._horon_compression = compression
        self.backward_passes_per_step = passes
        return self

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
