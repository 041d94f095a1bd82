"""A node that allocates something else of its gradient's size first, for tests of gradients in their places."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class AfterAnother(torch.autograd.Function):
    """Makes the gradient of a parameter after another tensor of its size, which it keeps."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ parameter

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        AfterAnother.kept.append(torch.full((x.shape[1], gradients[0].shape[1]), 7.0))
        return None, x.t() @ gradients[0]
