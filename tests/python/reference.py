"""Inputs and plain references for collectives.

Every rank generates the inputs of all ranks from seeds, so that it knows what it must receive without communicating.
Integers are reduced by numpy (torch lacks operators for unsigned types), floating types in float64.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np
import torch
import torch.distributed as dist
from harness import on_gloo

SIZES = [0, 1, 3, 1000, 65537, 300000]
SMALL_SIZES = [0, 1, 3, 1000]
HALF = [torch.float16, torch.bfloat16]
FLOATING = [*HALF, torch.float32, torch.float64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGER = [*SIGNED, *UNSIGNED]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATING, *INTEGER, torch.bool, *COMPLEX]

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
PREMUL_FACTOR = 2.0
BITWISE = {"BAND", "BOR", "BXOR"}


def reduce_op(name: str) -> dist.ReduceOp:
    """The ReduceOp of that name."""
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(PREMUL_FACTOR)
    return getattr(dist.ReduceOp, name)


def defined(op: str, dtype: torch.dtype) -> bool:
    """Whether the operation has a meaning for the dtype (complex: what torch's Python layer lets through)."""
    if op in BITWISE:
        return dtype in INTEGER or dtype is torch.bool
    if dtype in COMPLEX:
        return op in ("SUM", "AVG")
    if op == "PREMUL_SUM":
        return dtype in FLOATING
    return not (op == "AVG" and dtype is torch.bool)


def supported(op: str, dtype: torch.dtype) -> bool:
    """`defined`, less what Gloo refuses or gets wrong when the tests run on it."""
    if not on_gloo():
        return defined(op, dtype)
    if not movable(dtype) or op == "PREMUL_SUM" or (op == "AVG" and dtype not in FLOATING + COMPLEX):
        return False
    if dtype is torch.bool and op not in ("MIN", "MAX", "BAND", "BOR"):
        return False  # Adds and multiplies bytes.
    return defined(op, dtype)


def movable(dtype: torch.dtype) -> bool:
    """Whether the backend moves the dtype at all (Gloo: not all integers)."""
    return not on_gloo() or dtype not in (torch.int16, torch.uint16, torch.uint32, torch.uint64)


@lru_cache(maxsize=256)
def _values(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 7919 * rank + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    if dtype in UNSIGNED:
        return torch.randint(0, 6, (count,), generator=generator).to(dtype)
    if dtype in SIGNED:
        return torch.randint(-5, 6, (count,), generator=generator).to(dtype)
    if dtype in COMPLEX:
        parts = torch.randn((count, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return (values.sign() * (0.5 + values.abs() / 2)).to(dtype)  # Away from zero, so that products stay in range.


def make_input(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What `rank` contributes: a fresh tensor of `count` elements. Small integers, so that no sum of five overflows."""
    return _values(rank, count, dtype, seed).clone()


def all_inputs(world_size: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The inputs of all ranks. Not to be changed."""
    return [_values(rank, count, dtype, seed) for rank in range(world_size)]


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The plain reference of a reduction over ranks."""
    dtype = inputs[0].dtype
    if dtype in COMPLEX:
        return torch.view_as_complex(reduced([torch.view_as_real(t).contiguous() for t in inputs], op))
    if dtype in FLOATING:
        return _reduced_floats(torch.stack([t.double() for t in inputs]), op).to(dtype)
    if dtype is torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    arrays = [t.numpy() for t in inputs]
    functions = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    result = reduce(functions[op], arrays)
    if op == "AVG":  # Towards zero, like a division in C.
        result = np.trunc(result.astype(np.float64) / len(arrays)).astype(result.dtype)
    return torch.from_numpy(np.array(result))


def _reduced_floats(stack: torch.Tensor, op: str) -> torch.Tensor:
    if op == "SUM":
        return stack.sum(0)
    if op == "AVG":
        return stack.mean(0)
    if op == "PREMUL_SUM":
        return stack.sum(0) * PREMUL_FACTOR
    if op == "PRODUCT":
        return stack.prod(0)
    return stack.amin(0) if op == "MIN" else stack.amax(0)


TOLERANCES = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (8e-3, 8e-3),
    torch.float32: (2e-6, 2e-6),
    torch.float64: (1e-14, 1e-14),
    torch.complex64: (2e-6, 2e-6),
    torch.complex128: (1e-14, 1e-14),
}
"""Relative and absolute: about one ulp of the half types, a few of the others (a sum's order is free)."""


def check_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit equality, for what is only moved."""
    assert actual.dtype == expected.dtype, f"dtype is {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"shape is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not torch.equal(as_bytes(actual), as_bytes(expected)):
        wrong = (as_bytes(actual) != as_bytes(expected)).nonzero().flatten() // max(actual.element_size(), 1)
        where = int(wrong[0])
        raise AssertionError(
            f"element {where} of {actual.numel()} is {actual.reshape(-1)[where].item()}, "
            f"not {expected.reshape(-1)[where].item()}; {wrong.unique().numel()} differ"
        )


def check_reduced(actual: torch.Tensor, inputs: list[torch.Tensor], op: str) -> None:
    """Compares with the reference: exactly for integers and for MIN and MAX, within TOLERANCES otherwise."""
    expected = reduced(inputs, op).reshape(actual.shape)
    if actual.dtype not in TOLERANCES or op in ("MIN", "MAX"):
        check_equal(actual, expected)
        return
    rtol, atol = TOLERANCES[actual.dtype]
    if on_gloo() and actual.dtype in HALF:
        rtol, atol = 4 * rtol, 8 * atol  # Rounds at every step.
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * (op in ("SUM", "AVG", "PREMUL_SUM")))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for bitwise comparison."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)
