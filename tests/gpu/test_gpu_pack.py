"""The pack kernel by itself: many tensors into one buffer and back, bit for bit, scaled in float32."""

from __future__ import annotations

import pytest
import torch
from gpu_harness import run_ranks
from gpu_tensors import check_equal, make_input, on_cpu, on_gpu, output
from harness import Cases

pytestmark = pytest.mark.horon_only

ALIGNMENT_BYTES = 16
SIZES = {
    "one": [1000],
    "none": [0],
    "odd": [1, 3, 0, 15, 17, 255, 4097],
    "skewed": [1 << 20, 1, 1, 1, 300_000, 7, 64, 64, 64],
    "more than one launch's table": [i % 7 + 1 for i in range(2500)],
}


def _offsets(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Where tensors lie in the buffer, in elements, and its size: each begins at a multiple of 16 bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end // tensor.element_size())
        end += (tensor.numel() * tensor.element_size() + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return offsets, end // tensors[0].element_size()


def _round_trip(rank: int, n: int) -> None:
    from horon import _C

    cases = Cases()
    for name, sizes in SIZES.items():
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
            for shift in (0, 1):
                with cases(f"{name} {dtype} shifted by {shift}"):
                    inputs = [make_input(0, size + shift, dtype, seed=i % 5)[shift:] for i, size in enumerate(sizes)]
                    wholes = [on_gpu(make_input(0, size + shift, dtype, seed=i % 5)) for i, size in enumerate(sizes)]
                    tensors = [whole[shift:] for whole in wholes]
                    offsets, elements = _offsets(tensors)
                    buffer = output(max(elements, 1), dtype)
                    _C.cuda_pack(tensors, buffer)
                    packed = on_cpu(buffer)
                    for expected, offset in zip(inputs, offsets, strict=True):
                        assert torch.equal(packed[offset : offset + expected.numel()], expected)
                    found = [output(size, dtype) for size in sizes]
                    _C.cuda_unpack(buffer, found)
                    for tensor, expected in zip(found, inputs, strict=True):
                        check_equal(tensor, expected)
    cases.check()


def test_round_trip() -> None:
    run_ranks(_round_trip, 1, init=False)


def _factors(rank: int, n: int) -> None:
    from horon import _C

    cases = Cases()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with cases(f"{dtype}"):
            inputs = [make_input(0, size, dtype, seed=size) for size in (5, 1000, 70001)]
            tensors = [on_gpu(tensor) for tensor in inputs]
            offsets, elements = _offsets(tensors)
            buffer = output(elements, dtype)
            _C.cuda_pack(tensors, buffer, factor=1 / 3)
            packed = on_cpu(buffer)
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            for expected, offset in zip(inputs, offsets, strict=True):
                scaled = (expected.to(wide) * torch.tensor(1 / 3, dtype=wide)).to(dtype)
                torch.testing.assert_close(packed[offset : offset + expected.numel()], scaled, rtol=0, atol=0)
            _C.cuda_unpack(buffer, tensors, factor=3.0)
            for tensor, expected in zip(tensors, inputs, strict=True):
                scaled = (expected.to(wide) * torch.tensor(1 / 3, dtype=wide)).to(dtype)
                check_equal(tensor, (scaled.to(wide) * 3).to(dtype))
    cases.check()


def test_factors_are_applied_in_float32() -> None:
    run_ranks(_factors, 1, init=False)
