"""What a call costs when other data has gone through the caches since the last one, as large tensors do.

    python benchmarks/cold_call.py

One process: nothing is communicated and nobody waited for. Before each call, `copy_` goes through as many bytes as
said, half of them read, half written; only the call is timed. The contenders take turns. Median microseconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

import horon  # noqa: F401  # torch.ops.horon
import noop
import torch
import torch.distributed as dist
from common import format_bytes, parse_bytes, print_table

kSizes = "0,64K,128K,256K,512K,1M,2M,4M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=kSizes, help="bytes that go through the caches; default: %(default)s")
    parser.add_argument("--calls", type=int, default=2000, help="of each contender, for each size")
    arguments = parser.parse_args()
    os.environ.update(noop.environment())
    if not noop.is_built():
        parser.exit(1, "the do-nothing backend, which calls are compared with, can not be compiled here\n")
    torch.set_num_threads(1)
    noop.register()
    dist.init_process_group("horon", store=dist.HashStore(), rank=0, world_size=1)
    groups = {name: dist.new_group(backend=name.replace("-", "")) for name in noop.kNames}
    world = dist.group.WORLD
    assert world is not None
    tensor = torch.ones(1)
    calls = {
        **{name: lambda group=group: dist.all_reduce(tensor, group=group) for name, group in groups.items()},
        "horon": lambda: dist.all_reduce(tensor),
        "horon-op": lambda: torch.ops.horon.all_reduce_(tensor, "sum", world.group_name),
    }
    rows = []
    gc.disable()
    for size in map(parse_bytes, arguments.sizes.split(",")):
        source = torch.ones(max(size // 8, 1))
        target = torch.empty_like(source)
        times: dict[str, list[int]] = {name: [] for name in calls}
        for index in range(arguments.calls + 20):
            for name, call in calls.items():
                if size:
                    target.copy_(source)
                started = time.perf_counter_ns()
                call()
                took = time.perf_counter_ns() - started
                if index >= 20:
                    times[name].append(took)
        rows.append([format_bytes(size), *(f"{statistics.median(found) / 1e3:.2f}" for found in times.values())])
    print_table("a call after so many bytes have gone through the caches, us", ["bytes", *calls], rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
