"""Collectives of ranks on several hosts: horon, with and without its parts, against Gloo, in one run.

    torchrun --standalone --nproc-per-node 4 benchmarks/hosts.py --per-host 2

On one machine: HORON_HOST_ID makes each `--per-host` ranks count as a host, and loopback is the network, which is as
fast as memory. `flat` is horon without shared memory within hosts, `carrier` horon with Gloo in the place of its own
connections. `send_recv` is a message from each rank of the first half to one of the other, and one back. Contenders
take turns in blocks of calls; a sample is the slowest rank's time for a call of a block.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import Timing, format_bytes, machine_info, parse_bytes, print_table, summarize, timing_rows, write_json

kSettings: dict[str, dict[str, str]] = {
    "horon": {},
    "flat": {"HORON_HIERARCHICAL": "off"},
    "carrier": {"HORON_CARRIER": "gloo"},
    "gloo": {},
}
kBlockBytes = 64 << 20
"""That a block of calls brings, at most."""


def _to_and_fro(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Between the halves of the ranks: a message, and one back."""
    half = group.size() // 2
    rank = group.rank()
    if rank < half:
        dist.send(tensor, rank + half, group=group)
        dist.recv(tensor, rank + half, group=group)
    elif rank < 2 * half:
        dist.recv(tensor, rank - half, group=group)
        dist.send(tensor, rank - half, group=group)


Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
kCalls: dict[str, Call] = {
    "all_reduce": lambda tensor, _, group: dist.all_reduce(tensor, group=group),
    "broadcast": lambda tensor, _, group: dist.broadcast(tensor, 0, group=group),
    "all_gather": lambda tensor, whole, group: dist.all_gather_into_tensor(whole, tensor, group=group),
    "reduce_scatter": lambda tensor, whole, group: dist.reduce_scatter_tensor(tensor, whole, group=group),
    "all_to_all": lambda tensor, whole, group: dist.all_to_all_single(whole, whole.clone(), group=group),
    "send_recv": lambda tensor, _, group: _to_and_fro(tensor, group),
    "barrier": lambda tensor, _, group: dist.barrier(group=group),
}
_WITH_WHOLE = ("all_gather", "reduce_scatter", "all_to_all")


def _make_groups(names: list[str]) -> dict[str, dist.ProcessGroup]:
    groups: dict[str, dist.ProcessGroup] = {}
    for name in names:
        os.environ.update(kSettings[name])
        made = dist.new_group(backend="gloo" if name == "gloo" else "horon", timeout=timedelta(minutes=5))
        assert isinstance(made, dist.ProcessGroup)
        groups[name] = made
        for variable in kSettings[name]:
            del os.environ[variable]
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-host", type=int, default=2, help="ranks that count as a host's; 0: as they really are")
    parser.add_argument("--collectives", default="all_reduce,broadcast,all_gather", help=", ".join(kCalls))
    parser.add_argument("--sizes", default="4,1K,64K,1M,16M", help="bytes that a rank brings")
    parser.add_argument("--contenders", default="horon,flat,gloo", help=", ".join(kSettings))
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each contender")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="file for a plot of the first collective")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if arguments.per_host > 0:
        os.environ["HORON_HOST_ID"] = f"host{rank // arguments.per_host}"
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    groups = _make_groups(arguments.contenders.split(","))
    machine = machine_info("benchmarks/hosts.py")
    timings: list[Timing] = []
    for collective in arguments.collectives.split(","):
        for size in [parse_bytes(text) for text in arguments.sizes.split(",")]:
            count = max(size // 4, 1)
            tensor = torch.ones(count)
            whole = torch.ones(n * count if collective in _WITH_WHOLE else 1)
            calls = max(1, min(100, kBlockBytes // size // (n if collective in _WITH_WHOLE else 1)))
            found: dict[str, list[float]] = {name: [] for name in groups}
            for turn in range(arguments.rounds + 1):
                for name, group in groups.items():
                    tensor.fill_(1)
                    dist.barrier(group=group)
                    started = time.perf_counter()
                    for _ in range(calls):
                        kCalls[collective](tensor, whole, group)
                    took = torch.tensor([(time.perf_counter() - started) / calls * 1e6])
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    if turn > 0:
                        found[name].append(took.item())
            bus_factor = 2 * (n - 1) / n if collective == "all_reduce" else 1.0
            for name, times in found.items():
                ns = [time_us * 1e3 for time_us in times]
                timings.append(summarize(name, size, bus_factor, ns, collective=collective))
            if collective == "barrier":
                break
        if rank == 0:
            cells = [timing for timing in timings if timing.collective == collective]
            print_table(f"{collective}, {n} ranks, {arguments.per_host} per host", *timing_rows(cells))
            medians = {(cell.size_bytes, cell.contender): cell.median_us for cell in cells}
            for size in dict.fromkeys(cell.size_bytes for cell in cells) if "horon" in groups else ():
                faster = {name: medians[size, name] / medians[size, "horon"] for name in groups if name != "horon"}
                ratios = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in faster.items())
                print(f"{format_bytes(size):>8}: {ratios}", flush=True)
    if rank == 0 and arguments.json:
        write_json(arguments.json, machine, timings, ranks=n, per_host=arguments.per_host)
    if rank == 0 and arguments.plot:
        from plots import plot_by_size

        first = arguments.collectives.split(",")[0]
        title = f"{first} of {n} ranks, {arguments.per_host} per host; {machine['cpu']}, {machine['date'][:10]}"
        plot_by_size(arguments.plot, title, [t for t in timings if t.collective == first], "horon", [])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
