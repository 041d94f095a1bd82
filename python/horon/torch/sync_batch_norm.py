"""Batch normalization over the batches of all ranks. Source: Horovod 0.28.1 ``torch.sync_batch_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horon.common._context import default_context
from horon.common._reduce_ops import Sum
from horon.torch._allgather import allgather
from horon.torch._allreduce import allreduce_


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose mean and variance are those of all ranks' batches together. On CPU, too.

    While it trains, all ranks have to call forward and backward the same number of times; their batches may differ in
    size. In evaluation mode it is ordinary batch normalization. Gradients of weight and bias are this rank's: the
    DistributedOptimizer averages them.

    Args:
        num_features: C of inputs of shape (N, C, ...).
        eps: Added to the variance.
        momentum: Weight of the new values in the running ones; None: all batches count the same.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether running values are kept, for evaluation.

    Raises:
        ValueError: In forward: fewer than two dimensions, or one value per channel over all ranks.

    Source: Horovod 0.28.1 ``SyncBatchNorm`` (GPU only there).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or default_context.topology.size == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._update_running_stats(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Any:
        mean, variance, count = _statistics_of_all(input)
        n_own = input.numel() // max(input.size(1), 1)
        if n_own <= 1 and float(count) <= 1:  # float() waits for a GPU
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        inverse_deviation = (variance + eps).rsqrt()
        shape = _channel_shape(input)
        normalized = (input.to(mean.dtype) - mean.view(shape)) * inverse_deviation.view(shape)
        output = normalized
        if weight is not None:
            output = output * weight.to(mean.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(mean.dtype).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse_deviation, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        input, weight, mean, inverse_deviation, count = ctx.saved_tensors
        shape, dims = _channel_shape(input), _reduced_dims(input)
        grad = grads[0].to(mean.dtype)
        normalized = (input.to(mean.dtype) - mean.view(shape)) * inverse_deviation.view(shape)
        sums = torch.stack((grad.sum(dims), (grad * normalized).sum(dims)))
        grad_weight = grad_bias = grad_input = None
        if ctx.needs_input_grad[1]:
            grad_weight = sums[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sums[0].to(weight.dtype if weight is not None else grads[0].dtype)
        if ctx.needs_input_grad[0]:
            means = allreduce_(sums.clone(), op=Sum, name="sync_batch_norm.backward") / count
            grad_input = grad - means[0].view(shape) - normalized * means[1].view(shape)
            scale = inverse_deviation if weight is None else inverse_deviation * weight.to(mean.dtype)
            grad_input = (grad_input * scale.view(shape)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None


def _statistics_of_all(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance by channel, and the number of values, over all ranks; at least in float32.

    Ranks send their own mean and sum of squared differences from it, which are then combined: sums of squares would
    lose digits where the mean is large.
    """
    dims = _reduced_dims(input)
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    n_own = values.numel() // values.size(1)
    if n_own:
        variance, mean = torch.var_mean(values, dims, correction=0)
    else:
        variance, mean = values.new_zeros(2, values.size(1))
    mine = torch.cat((values.new_tensor([n_own]), mean, variance * n_own))
    everyones = allgather(mine.unsqueeze(0), name="sync_batch_norm.forward")
    counts = everyones[:, :1]
    means, squares = everyones[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return mean, variance, count


def _channel_shape(input: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (input.dim() - 2)


def _reduced_dims(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]
