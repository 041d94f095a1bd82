"""How long a group takes to get other members, and what a call costs in such a group.

    torchrun --standalone --nproc-per-node 3 benchmarks/reconfigure.py

The contenders take turns; the slowest rank counts. `horon, ordinary` is a group that was made as usual, for the calls.
torch 2.15 or newer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from common import print_table

kBytes = 4
kUuids = itertools.count(1)


class Contender:
    """A default group of this process, which is put in its place for as long as it is used."""

    def __init__(self, backend: str, is_empty: bool, name: str) -> None:
        self.store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = dist.PrefixStore("group", self.store)
        options.group_rank, options.group_size = self.rank, self.size
        options.timeout = timedelta(seconds=60)
        options.global_ranks_in_group = []
        options.group_id = name
        options.enable_reconfigure = is_empty
        dist.Backend._ensure_backend_registered(backend)
        self.backend = dist.Backend._plugins[backend.upper()].creator_fn(options, None)

    def change(self) -> float:
        """Seconds that reconfigure() takes here, when all come at once."""
        uuid = next(kUuids)
        self.store.set(f"{uuid}/{self.rank}", self.backend.get_reconfigure_handle())
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid = uuid
        options.handles = [self.store.get(f"{uuid}/{rank}").decode() for rank in range(self.size)]
        dist.barrier()
        started = time.perf_counter()
        self.backend.reconfigure(options).wait()
        return time.perf_counter() - started

    def call(self, tensor: torch.Tensor) -> float:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        tensors = [tensor]
        started = time.perf_counter()
        work = self.backend.allreduce(tensors, options)
        if work is not None:
            work.wait()
        return time.perf_counter() - started


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=500, help="in each round (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("horon")
    contenders = {
        "horon": Contender("horon", True, "horon"),
        "gloo": Contender("gloo", True, "gloo"),
        "horon, ordinary": Contender("horon", False, "ordinary"),
    }
    changes: dict[str, list[float]] = {name: [] for name in contenders}
    calls: dict[str, list[float]] = {name: [] for name in contenders}
    tensor = torch.ones(kBytes // 4)
    for _ in range(arguments.rounds + 1):
        for name, contender in contenders.items():
            if name != "horon, ordinary":
                changes[name].append(slowest(contender.change()))
            times = sorted(contender.call(tensor) for _ in range(arguments.calls))
            calls[name].append(times[len(times) // 2])
    if dist.get_rank() == 0:
        rows = [
            [
                name,
                f"{statistics.median(changes[name][1:]) * 1e3:.2f}" if changes[name] else "",
                f"{min(changes[name][1:]) * 1e3:.2f} to {max(changes[name][1:]) * 1e3:.2f}" if changes[name] else "",
                f"{statistics.median(calls[name][1:]) * 1e6:.2f}",
            ]
            for name in contenders
        ]
        print_table(
            "Groups whose members change", ["", "reconfigure, ms", "from, to", f"all_reduce of {kBytes} B, us"], rows
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
