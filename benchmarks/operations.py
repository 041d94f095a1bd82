"""The collectives that are timed: how much they move, the tensors of a call, and what has to come out.

`size_bytes` is what nccl-tests calls the size: the tensor of all_reduce, broadcast, reduce and send_recv, and the
larger side of the others (what all_gather and gather collect, what reduce_scatter and scatter divide, one side of
all_to_all). Elements are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

kElementBytes = 4
kRoot = 0
kCollectives = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)

Allocate = Callable[[int], torch.Tensor]
"""Makes a float32 tensor of so many elements."""


@dataclass
class Buffers:
    """What one rank brings to one call; all_reduce, broadcast, reduce and send_recv work in place, on `input`."""

    input: torch.Tensor
    output: torch.Tensor
    parts: list[torch.Tensor] = field(
        default_factory=list
    )  # views of the divided side, by rank; root of gather, scatter


def allocate(collective: str, size_bytes: int, rank: int, n_ranks: int, empty: Allocate) -> Buffers:
    """Makes the buffers of one call with `empty` and fills them, so that their pages exist."""

    def zeros(elements: int) -> torch.Tensor:
        return empty(elements).zero_()

    whole = size_bytes // kElementBytes
    part = whole // n_ranks
    if collective in ("all_gather", "gather"):
        output = zeros(whole if collective == "all_gather" or rank == kRoot else 0)
        return Buffers(zeros(part), output, list(output.chunk(n_ranks)) if output.numel() else [])
    if collective == "reduce_scatter":
        return Buffers(zeros(whole), zeros(part))
    if collective == "scatter":
        source = zeros(whole if rank == kRoot else 0)
        return Buffers(source, zeros(part), list(source.chunk(n_ranks)) if source.numel() else [])
    if collective == "all_to_all":
        return Buffers(zeros(whole), zeros(whole))
    tensor = zeros(max(1, whole))
    return Buffers(tensor, tensor)


def receives(collective: str, buffers: Buffers, rank: int) -> bool:
    """Returns whether this rank gets a result."""
    if collective == "broadcast":
        return rank != kRoot
    if collective == "reduce":
        return rank == kRoot
    return collective != "barrier" and buffers.output.numel() > 0


def bus_factor(collective: str, n_ranks: int) -> float:
    """Returns busbw / algbw: what the busiest link carries for each byte (nccl-tests, doc/PERFORMANCE.md)."""
    if collective == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (n_ranks - 1) / n_ranks
    return 1.0


def calls_per_sample(collective: str) -> int:
    """A ping-pong is two messages, and a message is what is reported."""
    return 2 if collective == "send_recv" else 1


def fill(buffers: Buffers, rank: int) -> None:
    """Writes values that float32 sums exactly."""
    pattern = torch.arange(buffers.input.numel(), dtype=torch.float32).remainder_(1021)
    buffers.input.copy_(pattern + rank)


def expected(collective: str, buffers: Buffers, rank: int, n_ranks: int) -> torch.Tensor | None:
    """Returns what `output` must hold after a call on what `fill` wrote, or None where nothing is received."""
    elements = buffers.output.numel()
    if collective != "broadcast" and not receives(collective, buffers, rank):
        return None

    def pattern(count: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + count, dtype=torch.float32).remainder_(1021)

    total_of_ranks = n_ranks * (n_ranks - 1) // 2
    if collective in ("all_reduce", "reduce"):
        return pattern(elements) * n_ranks + total_of_ranks
    if collective == "reduce_scatter":
        return pattern(elements, rank * elements) * n_ranks + total_of_ranks
    if collective == "broadcast":
        return pattern(elements) + kRoot
    if collective == "scatter":
        return pattern(elements, rank * elements) + kRoot
    if collective == "send_recv":
        return pattern(elements) + (rank - rank % 2)
    part = elements // n_ranks
    sources = range(n_ranks)
    if collective == "all_to_all":
        return torch.cat([pattern(part, rank * part) + source for source in sources])
    return torch.cat([pattern(part) + source for source in sources])  # all_gather, gather
