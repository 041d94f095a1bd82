"""Pack and unpack of 64 MiB in skewed sizes: horon's kernel, torch._foreach_copy_, torch.cat, a plain copy."""

from __future__ import annotations

from typing import Any

import gpu_timing
import torch
from common import kMiB
from gpu_timing import Cell, Contender
from gpu_workloads import skewed_sizes

kAlignmentBytes = 16  # where tensors begin in the buffer


def measure(rank: int, n_ranks: int, rounds: int) -> list[Cell]:
    """Runs on one rank, without communication."""
    cells: list[Cell] = []
    for dtype, factor in ((torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float32, 0.5)):
        for direction in ("pack", "unpack"):
            scaled = "" if factor == 1 else f", times {factor}"
            table = f"{direction}, {str(dtype).removeprefix('torch.')}{scaled}"
            contenders = _contenders(direction, dtype, factor)
            cells += gpu_timing.cells(table, contenders, gpu_timing.take_turns(contenders, rounds, on_device=True))
    return cells


def _contenders(direction: str, dtype: torch.dtype, factor: float) -> list[Contender]:
    from horon import _C

    sizes = [size * 4 // dtype.itemsize for size in skewed_sizes()]
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    step = kAlignmentBytes // dtype.itemsize
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += (size + step - 1) // step * step
    buffer, other = torch.empty(end, dtype=dtype, device="cuda"), torch.empty(end, dtype=dtype, device="cuda")
    views = [buffer[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    packed = [tensor.clone() for tensor in tensors]

    def check_pack() -> None:
        _same(views, [tensor * factor for tensor in tensors])

    def check_unpack() -> None:
        _same(packed, [view * factor for view in views])

    n_bytes = end * dtype.itemsize
    assert n_bytes >= 63 * kMiB
    calls: dict[str, Any]
    if direction == "pack":
        calls = {"horon": (lambda: _C.cuda_pack(tensors, buffer, factor=factor), check_pack)}
        if factor == 1:
            calls["_foreach_copy_"] = (lambda: torch._foreach_copy_(views, tensors), check_pack)
            calls["cat"] = (lambda: torch.cat(tensors, out=other[: sum(sizes)]), lambda: None)
        else:
            calls["_foreach_copy_ and _foreach_mul_"] = (lambda: _copy_scaled(views, tensors, factor), check_pack)
    else:
        torch._foreach_copy_(views, tensors)
        calls = {"horon": (lambda: _C.cuda_unpack(buffer, packed, factor=factor), check_unpack)}
        if factor == 1:
            calls["_foreach_copy_"] = (lambda: torch._foreach_copy_(packed, views), check_unpack)
        else:
            calls["_foreach_copy_ and _foreach_mul_"] = (lambda: _copy_scaled(packed, views, factor), check_unpack)
    calls["plain copy"] = (lambda: other.copy_(buffer), lambda: None)
    return [Contender(name, run, check=check, n_bytes=n_bytes) for name, (run, check) in calls.items()]


def _copy_scaled(to: list[torch.Tensor], source: list[torch.Tensor], factor: float) -> None:
    torch._foreach_copy_(to, source)
    torch._foreach_mul_(to, factor)


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        raise AssertionError("the copy is not what was copied")
