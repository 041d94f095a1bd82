"""Says the order when somebody calls init_process_group after hvd.init()."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

_MESSAGE = (
    "trying to initialize the default process group twice! horon: hvd.init() has made it already (backend horon). "
    "Call torch.distributed.init_process_group before hvd.init(), which then joins it, or not at all."
)


class OrderGuard:
    """While installed, ``torch.distributed.init_process_group`` says this when a default group exists.

    torch's own error does not know who made the first group. Names that were imported from torch.distributed earlier
    keep torch's error.
    """

    def __init__(self) -> None:
        self._original: Any = None

    def install(self) -> None:
        if self._original is not None:
            return
        original = self._original = dist.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized():
                raise ValueError(_MESSAGE)
            return original(*args, **kwargs)

        self._replace(original, init_process_group)

    def remove(self) -> None:
        if self._original is not None:
            self._replace(dist.init_process_group, self._original)
            self._original = None

    @staticmethod
    def _replace(old: Any, new: Any) -> None:
        for module in (dist, dist.distributed_c10d):
            if getattr(module, "init_process_group", None) is old:
                module.init_process_group = new  # type: ignore[attr-defined]
