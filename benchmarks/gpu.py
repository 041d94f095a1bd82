"""Measures the GPU parts: pack and unpack, all-reduces, a training step; writes JSON and docs/gpu-results.md.

    python benchmarks/gpu.py                  # everything, about ten minutes on one GPU
    python benchmarks/gpu.py --parts pack     # only a part; what the others measured on this machine and commit stays
    python benchmarks/gpu.py --fit-cost       # the constants of csrc/cuda/fusion_policy.h; kept in the JSON
    python benchmarks/gpu.py --report         # the report again, from the JSON; needs no GPU

One rank, and two ranks on one GPU. **Several ranks on one GPU prove behaviour, packing and what a call costs the host,
never scaling**: their kernels take turns on the GPU, and their bytes go through host memory or sockets. All contenders
of a table live in the same processes and take turns, in random order; ratios are of one run.

    nccl         PyTorch's NCCL backend ("nccl"; from torch 2.15 on the new one)
    nccl-legacy  torch 2.15: the one before it (as TORCH_DIST_USE_NCCL2=0 makes "nccl")
    direct       all_reduce(async_op=True) of each tensor, then wait() of each
    synchronous  all_reduce of each tensor
    coalesced    one coalescing manager around all of them; horon fuses what gains by it
    one call     allreduce_coalesced of all of them, which needs no Python for each tensor
    bucketed     copied into buckets of 25 MiB, reduced, and copied back, as DDP does
    named        hvd.allreduce_async_ of each tensor, then synchronize
    DistributedOptimizer  gradients from autograd; "accumulation alone" is the same without communication
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import gpu_report
import ranks
from gpu_timing import Cell

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs" / "gpu-results.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
kNoGpu = 2  # exit code
kParts = ("pack", "operations", "training")
kTimeoutSeconds = 400.0


def why_not() -> str | None:
    """Returns why nothing can be measured here, in one line, or None."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if torch.cuda.device_count() == 0:
        return "there is no GPU"
    if "simulator" in os.environ.get("LD_PRELOAD", ""):
        return "the GPU is simulated"
    from horon import _C

    return None if _C.has_gpu_parts() else "this build of horon has no GPU parts (see docs/gpu.md)"


def describe_machine() -> dict[str, Any]:
    """Returns machine, date, commit and versions."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "GPU": f"{properties.name}, {properties.total_memory >> 30} GiB, {properties.multi_processor_count} SMs",
        "driver": driver,
        "CUDA of torch": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": os.environ.get("HORON_COMMIT") or _output(f"git -C {ROOT} describe --always --dirty".split()),
        **common.machine_info("benchmarks/gpu.py"),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rounds_for(n_ranks: int, rounds: int) -> int:
    """Ranks that share a GPU get slices of its time, of a millisecond or two: a call that needs both takes as long."""
    return rounds if n_ranks == 1 else max(rounds // 8, 3)


def jobs_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Any, int]]:
    """Yields what is measured in one go, on fresh processes: name, job, number of ranks."""
    import gpu_operations
    import gpu_pack
    import gpu_ranks
    import gpu_training
    from gpu_workloads import WORKLOADS

    if "pack" in arguments.parts:
        yield "pack", gpu_ranks.Job(gpu_pack.measure, (arguments.rounds,)), 1
    for n_ranks in arguments.ranks:
        rounds = rounds_for(n_ranks, arguments.rounds)
        if "operations" in arguments.parts:
            for workload in WORKLOADS:
                if arguments.workloads not in workload.name:
                    continue
                yield workload.name, gpu_ranks.Job(gpu_operations.measure, (rounds, workload.name)), n_ranks
        if "training" in arguments.parts:
            for batch in arguments.batches or gpu_training.kBatches:
                name = gpu_training.table_of(batch)
                yield name, gpu_ranks.Job(gpu_training.measure, (rounds, batch)), n_ranks


def merged(old: list[dict[str, Any]], new: list[Cell]) -> list[dict[str, Any]]:
    """Returns the cells with those measured again in place of what they were."""

    def key(cell: dict[str, Any]) -> tuple[Any, ...]:
        return cell["table"], cell["contender"], cell["n_ranks"]

    return list({**{key(cell): cell for cell in old}, **{key(asdict(cell)): asdict(cell) for cell in new}}.values())


def measure(arguments: argparse.Namespace, document: dict[str, Any], machine: dict[str, Any]) -> bool:
    """Runs the parts that were asked for, and keeps what each has measured; False if one failed."""
    before = document.get("machine") or {}
    if any(before.get(name) != machine[name] for name in ("GPU", "NCCL", "commit")):
        document["cells"] = []
    all_done = True
    for name, job, n_ranks in jobs_of(arguments):
        try:
            cells = _timed(name, job, n_ranks)
        except ranks.RankFailed as error:
            print(f"gpu: {name}, {n_ranks} ranks: {error}; all ranks have been ended", file=sys.stderr, flush=True)
            all_done = False
            continue
        document["cells"] = merged(document["cells"], cells)
        document["machine"] = machine
        save(arguments.json, document)
    return all_done


def save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _timed(name: str, job: Any, n_ranks: int) -> Any:
    import gpu_ranks

    started = time.monotonic()
    result = gpu_ranks.run(job, n_ranks, kTimeoutSeconds)
    print(f"{name}, {n_ranks} rank{'s' if n_ranks > 1 else ''}: {time.monotonic() - started:.0f} s", flush=True)
    return result


def fit_cost(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the constants, and both kinds of communicators, at each number of ranks; yields all that is known."""
    import gpu_fit
    import gpu_ranks

    costs: list[dict[str, Any]] = []
    cells: list[Cell] = []
    for n_ranks in arguments.ranks:
        job = gpu_ranks.Job(gpu_fit.costs, (rounds_for(n_ranks, arguments.rounds),))
        one = _timed("costs", job, n_ranks)
        costs.append({**one, "cells": [asdict(cell) for cell in one["cells"]]})
        yield {"costs": costs, "communicators": []}
    for n_ranks in arguments.ranks:
        job = gpu_ranks.Job(gpu_fit.communicators, (rounds_for(n_ranks, arguments.rounds),))
        cells += _timed("communicators", job, n_ranks)
        yield {"costs": costs, "communicators": [asdict(cell) for cell in cells]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(kParts), help="comma-separated")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, comma-separated")
    parser.add_argument("--workloads", default="", metavar="TEXT", help="only those of operations whose name has it")
    parser.add_argument(
        "--batches", default="", help="images of a training step, comma-separated; all that are planned"
    )
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender")
    parser.add_argument("--fit-cost", action="store_true", help="only the constants of the fusion policy")
    parser.add_argument("--report", action="store_true", help="only write the report, from the JSON")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=REPORT, help="the report to rewrite")
    arguments = parser.parse_args()
    arguments.parts = [part for part in arguments.parts.split(",") if part]
    arguments.batches = [int(n) for n in arguments.batches.split(",") if n]
    arguments.ranks = [int(n) for n in arguments.ranks.split(",")]
    if unknown := set(arguments.parts) - set(kParts):
        parser.error(f"--parts: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(kParts)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    document: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    all_done = True
    if not arguments.report:
        reason = why_not()
        if reason:
            print(f"gpu: nothing is measured: {reason}", file=sys.stderr)
            return kNoGpu
        machine = describe_machine()
        if arguments.fit_cost:
            try:
                for fit in fit_cost(arguments):
                    document["fit"] = {"machine": machine, **fit}
                    save(arguments.json, document)
            except ranks.RankFailed as error:
                print(f"gpu: {error}; all ranks have been ended", file=sys.stderr)
                all_done = False
        else:
            all_done = measure(arguments, document, machine)
    cells = [Cell(**cell) for cell in document.get("cells", [])]
    gpu_report.write(arguments.output, document.get("machine"), cells, document.get("fit"))
    for goal in gpu_report.goals(cells):
        print(f"{goal.met:>12}  {goal.measured:>8}  ({goal.asked})  {goal.line}")
    return 0 if all_done else 1


if __name__ == "__main__":
    sys.exit(main())
