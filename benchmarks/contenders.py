"""What an all-reduce is compared with: other backends, PyTorch's call without communication, and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Contender(Protocol):
    """One way to be timed. Every rank makes the same calls."""

    name: str
    reduces: bool  # whether the tensors hold the sum afterwards

    def run(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Makes one call for each tensor and returns n + 1 stamps in ns, taken before the first and after each."""


class AllReduce:
    """`dist.all_reduce` on a group of its own. "fake" is PyTorch's backend that does nothing: the floor of a call."""

    def __init__(self, backend: str) -> None:
        if backend == "fake":
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it
        self.name = backend
        self.reduces = backend != "fake"
        self._group = dist.new_group(backend=backend)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        now, all_reduce, group = time.perf_counter_ns, dist.all_reduce, self._group
        stamps = [now()]
        for tensor in tensors:
            all_reduce(tensor, group=group)
            stamps.append(now())
        return stamps


class Memcpy:
    """All ranks copy the tensor once, at the same time: what the memory gives, for scale."""

    name = "memcpy"
    reduces = False

    def __init__(self) -> None:
        self._destinations: list[torch.Tensor] = []

    def run(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        self._provide_destinations(tensors)
        now = time.perf_counter_ns
        stamps = [now()]
        for tensor, destination in zip(tensors, self._destinations, strict=False):
            destination.copy_(tensor)
            stamps.append(now())
        return stamps

    def _provide_destinations(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._destinations and self._destinations[0].numel() != tensors[0].numel():
            self._destinations.clear()
        missing = len(tensors) - len(self._destinations)
        self._destinations += [torch.zeros_like(tensors[0]) for _ in range(missing)]


def make_contender(name: str) -> Contender:
    """Makes it on every rank of the default group; blocks until all ranks do."""
    return Memcpy() if name == "memcpy" else AllReduce(name)
