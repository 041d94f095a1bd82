"""The extension module: bindings without logic (torch_backend/bindings.cc)."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

class Options:
    """Settings of a process group; see docs/options.md. All ranks of a group must use the same.

    Args:
        timeout: Default timeout of the group's operations; torch's own ``timeout=`` argument wins.
    """

    inline_bytes: int
    buffer_bytes: int
    ring_bytes: int
    eager_bytes: int
    host_id: str
    global_ranks_in_group: list[int]
    group_name: str
    _timeout: timedelta
    def __init__(self, timeout: timedelta = ...) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class HoronBackend:
    """A ``c10d::Backend``, as ``pg._get_backend(device)`` returns it."""

    @property
    def options(self) -> Options: ...
    @property
    def is_shared(self) -> bool:
        """True when all ranks share memory; False when Gloo carries bytes."""

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduces a CPU tensor in place and blocks, past c10d's dispatcher: no Work, no hooks.

        Args:
            tensor: Any shape; the same number of elements and dtype on every rank.
            op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
        """

    def get_error(self) -> Any: ...
    def split(self, store: Any, ranks: list[int], options: Options | None = None) -> HoronBackend | None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

def create_backend(
    store: Any,
    rank: int,
    size: int,
    options: Options,
    make_gloo: Callable[[Any, int, int, timedelta], Any],
) -> HoronBackend: ...
def shutdown_all(drain: timedelta) -> None: ...
def active_instruction_set() -> str: ...
def empty_in_arena(sizes: list[int], dtype: torch.dtype) -> torch.Tensor: ...
def empty_like_in_arena(like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor: ...
def is_in_arena(tensor: torch.Tensor) -> bool: ...
def arena_statistics() -> dict[str, int]: ...
def register_ddp_arena_hook(reducer: Any, group: Any, keep_old_memory: bool) -> None: ...
