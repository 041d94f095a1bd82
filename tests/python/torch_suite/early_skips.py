"""Turns upstream's skips by exit code into skips that cost no process.

`torch.testing._internal.common_distributed` decides about GPUs and world size inside the test process: two ranks are
started, rendezvous, and leave with an exit code that means "skipped". The conditions are known beforehand, so the same
decorators are replaced by ones that ask at import and mark the test with `unittest.skip`.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.testing._internal import common_distributed

Test = TypeVar("Test", bound=Callable[..., Any])
Decorator = Callable[[Test], Test]


def install() -> None:
    """Replaces the decorators; call it before `distributed_test` is imported."""
    world_size = int(os.environ["WORLD_SIZE"])
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    upstream_lt_x_gpu = common_distributed.skip_if_lt_x_gpu

    def skip_if_lt_x_gpu(x: int, **options: Any) -> Decorator[Any]:
        if devices >= x or (options.get("allow_cpu") and devices == 0):
            return upstream_lt_x_gpu(x, **options)
        return _skip(f"needs {x} accelerators, found {devices}")

    common_distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    if devices < world_size:
        common_distributed.skip_if_no_gpu = _skip(f"needs {world_size} accelerators, found {devices}")
    if world_size < 8:
        common_distributed.skip_if_small_worldsize = _skip(f"needs 8 ranks, has {world_size}")
    if world_size % 2 == 1:
        common_distributed.skip_if_odd_worldsize = _skip("needs an even number of ranks")


def _skip(reason: str) -> Decorator[Any]:
    def decorator(test: Any) -> Any:
        @functools.wraps(test)  # upstream looks at __wrapped__ of some of its tests
        def never_called(*args: Any, **kwargs: Any) -> None:
            raise unittest.SkipTest(reason)

        return unittest.skip(reason)(never_called)

    return decorator
