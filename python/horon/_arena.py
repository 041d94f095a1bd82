"""Tensors in this process's arena: see docs/arena.md."""

from __future__ import annotations

from collections.abc import Sequence

from horon import _version_check

_version_check.check()

import torch  # noqa: E402  (after the version check, which gives a clear error)

from horon import _C  # noqa: E402


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """An uninitialised CPU tensor in the arena, like ``torch.empty``.

    Collectives on it need no copies where all ranks use such tensors; elsewhere it is an ordinary tensor.

    Args:
        size: Numbers, or one sequence of them.
        dtype: Default: ``torch.get_default_dtype()``.
        requires_grad: As in ``torch.empty``.

    Raises:
        torch.OutOfMemoryError: The budget is spent, or the system is short of memory.
        ValueError: The arena is off (``HORON_ARENA_BYTES=0``).
    """
    tensor = _C.empty_in_arena(_sizes(size), dtype or torch.get_default_dtype())
    return tensor.requires_grad_() if requires_grad else tensor


def _sizes(size: tuple[int | Sequence[int], ...]) -> list[int]:
    if len(size) == 1 and not isinstance(size[0], int):
        return list(size[0])
    return list(size)  # type: ignore[arg-type]  # C++ checks that they are numbers


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Like :func:`empty`, filled with zeros."""
    tensor = empty(*size, dtype=dtype).zero_()
    return tensor.requires_grad_() if requires_grad else tensor


def empty_like(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """An uninitialised tensor in the arena with size and layout of another CPU tensor, like ``torch.empty_like``.

    Raises: as :func:`empty`.
    """
    like = _C.empty_like_in_arena(tensor, dtype)
    return like.requires_grad_() if requires_grad else like


def is_in_arena(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory lies in this process's arena. False for tensors without elements."""
    return _C.is_in_arena(tensor)


def arena_statistics() -> dict[str, int]:
    """Numbers of bytes: ``budget_bytes``, ``used_bytes`` (by tensors), ``reserved_bytes`` (memory taken from the
    system), ``quarantined_bytes`` (lost to operations that failed; part of ``used_bytes``)."""
    return _C.arena_statistics()
