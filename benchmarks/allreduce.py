"""Times `dist.all_reduce` of float32 on one host against other backends, all in one run.

    python benchmarks/allreduce.py --against gloo,fake,memcpy --ranks 2 --json out.json --plot out.png

The contenders take turns, batch by batch, in the same processes and on the same tensors, so what the machine does
meanwhile falls on all of them. Before each batch the tensors are rewritten and a barrier is passed. Large tensors
rotate over more than twice the last-level cache. A call's duration is the time between two stamps on one rank;
medians and p99 are over all calls of all ranks. Every contender's sum is checked once for each size.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import ranks
import torch
import torch.distributed as dist
from contenders import Contender, make_contender

kLargeBytes = common.kMiB  # from here on the tensors rotate through more memory than the caches hold
kSmallPool = 8
kBatchSeconds = 0.02
kBatchCalls = (8, 1000)  # least and most calls of a small batch
kLeadInCalls = 2  # of a small batch, not counted: they absorb what the barrier left of the ranks' skew
kLeastRounds = 5
kWithoutBandwidth = ("fake",)


@dataclass(frozen=True)
class Request:
    """What the ranks are asked to measure; `contenders` begins with the subject."""

    contenders: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    cell_seconds: float
    l3_bytes: int


@dataclass(frozen=True)
class CellPlan:
    """How one contender is measured at one size: `rounds` batches of `calls` calls."""

    calls: int
    rounds: int


def plan_cell(size_bytes: int, pool: int, call_seconds: float, rewrite_seconds: float, request: Request) -> CellPlan:
    """Decides from one call's estimated duration; pure, so that all ranks decide alike."""
    if size_bytes >= kLargeBytes:
        calls = pool
    else:
        least, most = kBatchCalls
        calls = max(least, min(most, int(kBatchSeconds / call_seconds)))
    batch_seconds = calls * call_seconds + rewrite_seconds
    return CellPlan(calls, max(kLeastRounds, min(request.rounds, int(request.cell_seconds / batch_seconds))))


def takes_part(round_index: int, rounds: int, plan: CellPlan) -> bool:
    """Spreads a contender's batches evenly over the rounds."""
    return (round_index * plan.rounds) // rounds != ((round_index + 1) * plan.rounds) // rounds


def measure(rank: int, n_ranks: int, request: Request) -> list[common.Timing]:
    """Runs on every rank; rank 0's result counts."""
    contenders = [make_contender(name) for name in request.contenders]
    timings: list[common.Timing] = []
    for size_bytes in request.sizes_bytes:
        timings += _measure_size(rank, n_ranks, size_bytes, contenders, request)
    return timings


def _measure_size(
    rank: int, n_ranks: int, size_bytes: int, contenders: Sequence[Contender], request: Request
) -> list[common.Timing]:
    is_large = size_bytes >= kLargeBytes
    count = 2 * request.l3_bytes // size_bytes + 1 if is_large else kSmallPool
    pool = [torch.zeros(size_bytes // 4) for _ in range(max(2, count))]

    def rewrite() -> float:
        started = time.perf_counter()
        for i, tensor in enumerate(pool):
            tensor.fill_(rank + i)
        return time.perf_counter() - started

    def batch(contender: Contender, calls: int) -> list[int]:
        lead_in = 0 if is_large else kLeadInCalls
        tensors = [pool[i % len(pool)] for i in range(lead_in + calls)]
        rewrite()
        dist.barrier()
        stamps = contender.run(tensors)[lead_in:]
        return [after - before for before, after in itertools.pairwise(stamps)]

    def slowest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    plans: list[CellPlan] = []
    rewrite()
    for contender in contenders:
        _check_sum(contender, rank, n_ranks, pool[0])
        trial = batch(contender, min(4, len(pool)))
        call_seconds, rewrite_seconds = slowest(min(trial) / 1e9), slowest(rewrite())
        plans.append(plan_cell(size_bytes, len(pool), call_seconds, rewrite_seconds, request))

    durations_ns: list[list[int]] = [[] for _ in contenders]
    rounds = max(plan.rounds for plan in plans)
    gc.collect()
    gc.disable()
    for round_index in range(rounds):
        for contender, plan, into in zip(contenders, plans, durations_ns, strict=True):
            if takes_part(round_index, rounds, plan):
                into += batch(contender, plan.calls)
    gc.enable()

    everyones: list[Any] = [None] * n_ranks
    dist.all_gather_object(everyones, durations_ns)
    bus_factor = 2 * (n_ranks - 1) / n_ranks
    return [
        common.summarize(
            contender.name,
            size_bytes,
            bus_factor if contender.reduces else 1.0,
            [ns for one in everyones for ns in one[i]],
        )
        for i, contender in enumerate(contenders)
    ]


def _check_sum(contender: Contender, rank: int, n_ranks: int, tensor: torch.Tensor) -> None:
    """Raises unless the contender sums exactly; the values are integers that float32 holds."""
    if not contender.reduces:
        return
    base = torch.arange(tensor.numel(), dtype=torch.float32).remainder_(1021)
    tensor.copy_(base + rank)
    contender.run([tensor])
    expected = base * n_ranks + n_ranks * (n_ranks - 1) // 2
    if not torch.equal(tensor, expected):
        wrong = int((tensor != expected).sum())
        raise AssertionError(
            f"{contender.name}: all_reduce of {tensor.numel()} float32 over {n_ranks} ranks: {wrong} elements are wrong"
        )


def report(timings: list[common.Timing], arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    title = f"all_reduce, float32, {arguments.ranks} ranks on {machine['cores']} cores, torch {machine['torch']}"
    common.print_table(title, *common.timing_rows(timings, kWithoutBandwidth))
    others = [name for name in dict.fromkeys(t.contender for t in timings) if name != arguments.subject]
    by_size = common.ratios(timings, arguments.subject)
    rows = [[common.format_bytes(size), "", *(f"{by_size[size][other]:.3g}" for other in others)] for size in by_size]
    if others:
        how = f"how many times faster {arguments.subject} is (median)"
        common.print_table(f"{how}; fake is the floor of a call, memcpy a scale", ["size", "", *others], rows)
    if arguments.json:
        common.write_json(
            arguments.json,
            machine,
            timings,
            benchmark="allreduce",
            subject=arguments.subject,
            ranks=arguments.ranks,
            times_faster={str(size): row for size, row in by_size.items()},
        )
    if arguments.plot:
        from plots import plot_by_size

        plot_by_size(
            arguments.plot,
            f"{title}, {machine['cpu']}",
            timings,
            arguments.subject,
            without_bandwidth=kWithoutBandwidth,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", default="horon", help="the backend that the others are compared with")
    parser.add_argument("--against", default="gloo,fake,memcpy", help="backends, and fake or memcpy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4,1K,4K,64K,1M,16M,64M", help="bytes of the tensor")
    parser.add_argument("--rounds", type=int, default=40, help="most batches of a cell")
    parser.add_argument("--cell-seconds", type=float, default=2.0, help="time for one contender at one size")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until the ranks are killed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    try:
        arguments.sizes_bytes = tuple(common.parse_bytes(size) for size in arguments.sizes.split(","))
    except ValueError as error:
        parser.error(str(error))
    if any(size < 4 or size % 4 for size in arguments.sizes_bytes):
        parser.error("--sizes: a size is a multiple of 4 bytes, the size of a float32")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    against = [name for name in arguments.against.split(",") if name]
    request = Request(
        contenders=tuple(dict.fromkeys([arguments.subject, *against])),
        sizes_bytes=arguments.sizes_bytes,
        rounds=arguments.rounds,
        cell_seconds=arguments.cell_seconds,
        l3_bytes=common.l3_bytes(),
    )
    machine = common.machine_info("benchmarks/allreduce.py")
    started = time.monotonic()
    try:
        timings = ranks.run_on_ranks(measure, arguments.ranks, request, timeout_seconds=arguments.timeout)
    except ranks.RankFailed as error:
        print(f"allreduce: {error}; all ranks have been ended", file=sys.stderr)
        return 1
    report(timings, arguments, machine)
    print(f"\nmeasured in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
