"""What benchmarks/gpu.py measures with: shapes, sizes and the model. Nothing here needs a GPU, or torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from common import kKiB, kMiB
from torch import nn

Shape = tuple[int, ...]
_BLOCKS = (3, 4, 6, 3)
_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4


@dataclass(frozen=True)
class Workload:
    """Tensors that are reduced together."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def n_bytes(self) -> int:
        return 4 * sum(prod(shape) for shape in self.shapes)


def resnet50_shapes() -> tuple[Shape, ...]:
    """Returns the shapes of the 161 parameters of a ResNet-50, in the order of `parameters()`."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    n_in = 64
    for n_blocks, width in zip(_BLOCKS, _WIDTHS, strict=True):
        n_out = _EXPANSION * width
        for block in range(n_blocks):
            for kernel in ((width, n_in, 1, 1), (width, width, 3, 3), (n_out, width, 1, 1)):
                shapes += [kernel, (kernel[0],), (kernel[0],)]
            if block == 0:
                shapes += [(n_out, n_in, 1, 1), (n_out,), (n_out,)]
            n_in = n_out
    return (*shapes, (1000, n_in), (1000,))


def skewed_sizes(n_bytes: int = 64 * kMiB) -> list[int]:
    """Returns element counts of float32 tensors of `n_bytes` in all: each half of what is left, down to 1 KiB each.

    Half of the bytes are in one tensor, and nearly all tensors are small: where each tensor gets the same number of
    blocks, one tensor's blocks run long after all others.
    """
    sizes: list[int] = []
    left = n_bytes
    while left > kMiB:
        sizes.append(left // 2 // 4)
        left -= left // 2
    sizes += [kKiB // 4] * (left // kKiB)
    return sizes


WORKLOADS = (
    Workload("161 gradients of ResNet-50", resnet50_shapes()),
    Workload("1,000 x 4 KiB", ((kKiB,),) * 1000),
    Workload("one of 64 MiB", ((64 * kMiB // 4,),)),
)


def buckets_of(shapes: Sequence[Shape], bucket_bytes: int = 25 * kMiB) -> list[list[int]]:
    """Returns indices of tensors by bucket, filled from the last to the first, as DDP does."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(shapes))):
        n_bytes = 4 * prod(shapes[index])
        if filled and filled + n_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += n_bytes
    return buckets


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and what goes past them."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = _EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(n_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, n_out, 1, bias=False), nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.past = nn.Identity() if stride == 1 and n_in == n_out else _projection(n_in, n_out, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.past(x))


def _projection(n_in: int, n_out: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))


def resnet50() -> nn.Module:
    """Returns a ResNet-50: 25.6 million parameters in 161 tensors, the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    n_in = 64
    for stage, (n_blocks, width) in enumerate(zip(_BLOCKS, _WIDTHS, strict=True)):
        for block in range(n_blocks):
            layers.append(Bottleneck(n_in, width, 2 if stage > 0 and block == 0 else 1))
            n_in = _EXPANSION * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000))
