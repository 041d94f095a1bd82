"""Tensors on the GPU and back, and comparison with references computed on the CPU.

Inputs are made on the CPU and copied over, results are copied back and compared there: no kernel of torch's runs, so
that the same bodies work on the simulator.
"""

from __future__ import annotations

import reference
import torch
from reference import COMPLEX, FLOATING, HALF, INTEGER, PREMUL_FACTOR, TOLERANCES, all_inputs, make_input

__all__ = ["COMPLEX", "FLOATING", "HALF", "INTEGER", "PREMUL_FACTOR", "all_inputs", "make_input"]

DEVICE = torch.device("cuda", 0)
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*FLOATING, *INTEGER, torch.bool, *COMPLEX, *FLOAT8]
"""Data that is only moved travels as bytes, whatever it is."""
REDUCED = [
    *FLOATING,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    *COMPLEX,
]
"""What NCCL has sums for. It has no 16-bit integers."""
NOT_REDUCED = [torch.int16, torch.uint16]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"]
# The last one: 31 elements more than 32 blocks of whole accesses, which NCCL forgot in groups of one (nccl_plan.h).
SIZES = [0, 1, 3, 1000, 65537, 32 * 9216 + 31]
NCCL_BACKEND_LACKS = [torch.int16, torch.uint16, torch.uint32, torch.uint64, *FLOAT8, *COMPLEX]
"""Types that PyTorch's nccl backend does not take, or not in every version and operation."""


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU."""
    return tensor.to(DEVICE)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; waits for the current stream."""
    return tensor.detach().cpu()


def moved_input(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What `rank` contributes to what is only moved, on the CPU; float8 too."""
    if dtype in FLOAT8:
        return make_input(rank, count, torch.uint8, seed).view(dtype)
    return make_input(rank, count, dtype, seed)


def output(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the GPU that holds nothing that could pass for a result."""
    bytes_ = torch.full((count * torch.empty((), dtype=dtype).element_size(),), 0x55, dtype=torch.uint8)
    filled = bytes_.view(dtype) if dtype is not torch.bool else torch.ones(count, dtype=torch.bool)
    return on_gpu(filled)


def check_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit equality with a CPU tensor, for what is only moved."""
    found = on_cpu(actual)
    if expected.dtype in FLOAT8:
        assert found.dtype == expected.dtype, f"dtype is {found.dtype}, not {expected.dtype}"
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    reference.check_equal(found, expected)


def check_reduced(actual: torch.Tensor, inputs: list[torch.Tensor], op: str) -> None:
    """Compares with the CPU's reduction of all ranks' inputs: exactly for integers and for MIN and MAX.

    The tolerance of the half types is four of their ulps: NCCL rounds after each addition.
    """
    found = on_cpu(actual)
    expected = reference.reduced(inputs, op).reshape(found.shape)
    if found.dtype not in TOLERANCES or op in ("MIN", "MAX"):
        reference.check_equal(found, expected)
        return
    rtol, atol = TOLERANCES[found.dtype]
    if found.dtype in HALF:
        rtol, atol = 4 * rtol, 8 * atol
    assert found.dtype == expected.dtype, f"dtype is {found.dtype}, not {expected.dtype}"
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol * (op in ("SUM", "AVG", "PREMUL_SUM")))


def is_reduced(op: str, dtype: torch.dtype) -> bool:
    """Whether op has a meaning for a dtype that NCCL reduces."""
    if dtype is torch.bool:
        return op in ("SUM", "PRODUCT", "MIN", "MAX")
    return reference.defined(op, dtype)
