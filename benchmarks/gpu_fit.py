"""The three constants of csrc/cuda/fusion_policy.h, and blocking against non-blocking communicators."""

from __future__ import annotations

import os
from typing import Any

import gpu_ranks
import gpu_timing
import torch
import torch.distributed as dist
from common import kKiB, kMiB
from gpu_operations import coalesced, direct, on_tensors
from gpu_timing import Cell, Contender
from gpu_workloads import WORKLOADS, Workload

kCalls = (1, 2, 4, 8, 16, 32, 64, 128, 256)
kLaunches = 64


def costs(rank: int, n_ranks: int, rounds: int) -> dict[str, Any]:
    """Returns the constants and what they were fitted to. Runs on every rank; rank 0's result counts."""
    # One rank's calls in place are nothing to NCCL.
    per_call = _calls(rounds) if n_ranks > 1 else []
    one, many = _packs(rounds)
    launches_us = max(many.device_us or 0.0, many.host_us) / kLaunches
    copy_us = one.device_us or 0.0
    return {
        "n_ranks": n_ranks,
        "seconds_per_call": _slope([c.n_bytes // kKiB for c in per_call], [c.host_us for c in per_call]) * 1e-6
        if per_call
        else None,
        "seconds_per_launch": launches_us * 1e-6,
        "bytes_per_second": 2 * one.n_bytes / (copy_us * 1e-6) if copy_us else None,
        "cells": [*per_call, one, many],
    }


def _calls(rounds: int) -> list[Cell]:
    """Groups of 1 to 256 all-reduces of 1 KiB each, none of them fused: PyTorch's backend has no fusion buffer."""
    # The newer of PyTorch's two backends does not group the calls of a coalescing manager.
    group: Any = dist.new_group(backend="nccl-legacy" if gpu_ranks.has_nccl2() else "nccl")
    contenders = []
    for n_calls in kCalls:
        workload = Workload(f"{n_calls} calls", ((kKiB // 4,),) * n_calls)
        tensors = [torch.zeros(shape, device="cuda") for shape in workload.shapes]
        contenders.append(on_tensors(f"{n_calls} calls", workload, tensors, group, coalesced))
    return gpu_timing.cells("calls in one group", contenders, gpu_timing.take_turns(contenders, rounds))


def _packs(rounds: int) -> tuple[Cell, Cell]:
    """One launch that moves 64 MiB, and many that move nearly nothing."""
    from horon import _C

    large = torch.ones(64 * kMiB // 4, device="cuda")
    small = torch.ones(64, device="cuda")
    large_buffer, small_buffer = torch.empty_like(large), torch.empty_like(small)

    def many() -> None:
        for _ in range(kLaunches):
            _C.cuda_pack([small], small_buffer)

    contenders = [
        Contender("one launch of 64 MiB", lambda: _C.cuda_pack([large], large_buffer), n_bytes=64 * kMiB),
        Contender(f"{kLaunches} launches of 256 B", many, n_bytes=256),
    ]
    samples = gpu_timing.take_turns(contenders, rounds, on_device=True)
    one, several = gpu_timing.cells("launches of the pack kernel", contenders, samples)
    return one, several


def _slope(x: list[int], y: list[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def communicators(rank: int, n_ranks: int, rounds: int) -> list[Cell]:
    """Times horon with blocking and with non-blocking communicators, which a group makes at its first operation."""
    groups: dict[str, Any] = {}
    for kind, value in (("blocking", "1"), ("non-blocking", "0")):
        os.environ["HORON_NCCL_BLOCKING"] = value
        groups[kind] = dist.new_group(backend="horon")
        dist.all_reduce(torch.ones(1, device="cuda"), group=groups[kind])
    cells: list[Cell] = []
    for workload in WORKLOADS:
        contenders = []
        for way, call in (("direct", direct), ("coalesced", coalesced)):
            for kind, group in groups.items():
                tensors = [torch.zeros(shape, device="cuda") for shape in workload.shapes]
                contenders.append(on_tensors(f"{way}, {kind}", workload, tensors, group, call))
        cells += gpu_timing.cells(workload.name, contenders, gpu_timing.take_turns(contenders, rounds))
    return cells
