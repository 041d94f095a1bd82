"""One-sided windows against memcpy, in one run: what a put with its signal costs, and how fast a large one copies.

python benchmarks/window.py [--sizes 4,4K,64K,1M,16M] [--json out.json]

Needs torch 2.15, two ranks and, for figures that mean something, a quiet machine with two free cores. For each size:

- one way: rank 0 puts, rank 1 waits for the signal and puts back, rank 0 waits; half of the round trip.
- to itself: a rank puts into its own part and takes the signal; what the calls alone cost.
- put: the time that put() takes on rank 0, with rank 1's memory as the target.
- memcpy: the same number of bytes from the same source into ordinary memory, by ctypes.memmove, each right after a put.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from pathlib import Path
from typing import Any

import common
import ranks

_MOST_BYTES_PER_SERIES = 2 << 30
_REPEATS = (50, 5000)
_KINDS = ["one way", "to itself", "put", "memcpy"]


def _repeats(size_bytes: int) -> int:
    fewest, most = _REPEATS
    return max(fewest, min(most, _MOST_BYTES_PER_SERIES // max(size_bytes, 1)))


def _measure(rank: int, window: Any, group: Any, size_bytes: int, series: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    peer = 1 - rank
    source = torch.ones(size_bytes, dtype=torch.uint8)
    plain = torch.zeros(size_bytes, dtype=torch.uint8)
    to, origin = plain.data_ptr(), source.data_ptr()
    copy, clock = ctypes.memmove, time.perf_counter_ns
    put, wait_signal = window.put, window.wait_signal
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    repeats = _repeats(size_bytes) // series

    def one_way() -> None:
        for i in range(repeats + 20):
            start = clock()
            if rank == 0:
                put(source, peer, 0, False)
                wait_signal(peer, False)
            else:
                wait_signal(peer, False)
                put(source, peer, 0, False)
            if i >= 20:
                times["one way"].append((clock() - start) / 2)

    def alone() -> None:
        for i in range(repeats + 20):
            start = clock()
            put(source, rank, 0, False)
            wait_signal(rank, False)
            if i >= 20:
                times["to itself"].append(clock() - start)

    def against_memcpy() -> None:
        for i in range(repeats + 20):
            start = clock()
            put(source, peer, 0, False)
            middle = clock()
            copy(to, origin, size_bytes)
            end = clock()
            if i >= 20:
                times["put"].append(middle - start)
                times["memcpy"].append(end - middle)

    for _ in range(series):
        dist.barrier(group)
        one_way()
        for worker in (alone, against_memcpy):
            dist.barrier(group)
            if rank == 0:  # the other one waits in the barrier, asleep
                worker()
        dist.barrier(group)
        if rank == 1:
            for _ in range(repeats + 20):  # what against_memcpy has signalled
                wait_signal(peer, False)
    return times


def _worker(rank: int, n_ranks: int, sizes: list[int]) -> dict[int, dict[str, list[float]]]:
    import horon
    import torch
    import torch.distributed as dist
    from torch.distributed import _new_window

    group = dist.new_group(backend="horon")
    gc.disable()
    results = {}
    for size_bytes in sizes:
        tensor = horon.zeros(size_bytes, dtype=torch.uint8)
        window = _new_window(tensor, group)
        results[size_bytes] = _measure(rank, window, group, size_bytes, series=5)
        del window
    dist.barrier(group)
    dist.destroy_process_group(group)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,4K,64K,1M,16M", help="bytes, as in 4, 64K, 16M")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all")
    arguments = parser.parse_args()
    machine = common.machine_info("benchmarks/window.py")
    sizes = [common.parse_bytes(size) for size in arguments.sizes.split(",")]
    results = ranks.run_on_ranks(_worker, 2, sizes, timeout_seconds=arguments.timeout)
    timings = [
        common.summarize(kind, size_bytes, 1, durations, collective="window")
        for size_bytes, by_kind in results.items()
        for kind, durations in by_kind.items()
    ]
    columns, rows = common.timing_rows(timings)
    common.print_table(f"windows, 2 ranks, {machine['cpu']}, load {machine['load_average_before']}", columns, rows)
    medians = {(t.size_bytes, t.contender): t.median_us for t in timings}
    for size_bytes in sizes:
        speed = medians[size_bytes, "memcpy"] / medians[size_bytes, "put"]
        print(f"{common.format_bytes(size_bytes)}: a put runs at {speed:.2f} of memcpy's speed")
    if arguments.json:
        common.write_json(arguments.json, machine, timings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
