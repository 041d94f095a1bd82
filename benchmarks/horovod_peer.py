"""horon.torch beside Horovod 0.28.1 and Gloo, in one run: the same program, one import changed.

    benchmarks/build_peers.sh .venv-peers                     # once: Horovod, on torch 2.13
    python benchmarks/horovod_peer.py --json horovod_peer.json

Measured, on two ranks with one thread each:

    allreduce 4 B, 64 KiB, 16 MiB   hvd.allreduce, synchronous, one name
    1000 x 4 KiB                    hvd.allreduce_async under 1000 names, in another random order on each rank in each
                                    round; on Gloo, which has no names, the same tensors in order, one call each
    step mlp, step small-layers     a training step of the models of ddp_step.py with a DistributedOptimizer (on Gloo:
                                    DistributedDataParallel), as a share of the speed of the same processes without
                                    communication
    wait mlp, wait small-layers     the same with a barrier between backward pass and optimizer step instead of any
                                    communication: what is lost by waiting for the slower rank alone

The contenders take turns, round by round, each in fresh processes of its own; the numbers are medians over the rounds
of each round's median over the ranks. A contender that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

kContenders = ("horon", "horovod", "gloo")
kSizes = (4, 64 * common.kKiB, 16 * common.kMiB)
kModels = ("mlp", "small-layers")
kManyCount = 1000
kManyBytes = 4 * common.kKiB
kLeadInSteps = 1
_HERE = Path(__file__).resolve().parent

Results = dict[str, float]
"""By case: microseconds, or for steps the share of the speed without communication."""


class Horovod:
    """Horovod's API, whoever provides it."""

    def __init__(self, module: str) -> None:
        self._hvd: Any = importlib.import_module(module)
        self._hvd.init()
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.barrier = self._hvd.barrier

    def allreduce(self, tensor: Any) -> None:
        self._hvd.allreduce(tensor, op=self._hvd.Sum, name=f"one.{tensor.numel()}")

    def many(self, tensors: list[Any], order: list[int]) -> None:
        hvd = self._hvd
        handles = [hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=f"many.{i}") for i in order]
        for handle in handles:
            hvd.synchronize(handle)

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def gather(self, value: Any) -> list[Any]:
        return list(self._hvd.allgather_object(value, name="gather"))

    def close(self) -> None:
        """The library ends by itself at exit."""


class Gloo:
    """torch.distributed on Gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def allreduce(self, tensor: Any) -> None:
        self._dist.all_reduce(tensor)

    def many(self, tensors: list[Any], order: list[int]) -> None:
        for tensor in tensors:
            self._dist.all_reduce(tensor)

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Without it, PyTorch sometimes aborts at exit ("terminate called without an active exception")."""
        self._dist.destroy_process_group()


def time_us(function: Callable[[], None], barrier: Callable[[], None], seconds: float) -> float:
    """The median time of a call. The number of calls is fixed by the first ones, and the same on all ranks."""
    durations = []
    for _ in range(3):
        function()
    barrier()
    for _ in range(max(5, int(seconds * 1000))):
        started = time.perf_counter_ns()
        function()
        durations.append(time.perf_counter_ns() - started)
    return statistics.median(durations) / 1e3


def measure(contender: str, round_index: int, quick: bool) -> tuple[int, Results]:
    """Runs on every rank; returns its rank, and everyone's medians."""
    import torch

    torch.set_num_threads(1)
    library: Any = Gloo() if contender == "gloo" else Horovod(f"{contender}.torch")
    results: Results = {}
    gc.collect()
    gc.disable()
    for size in kSizes:
        tensor = torch.ones(size // 4)
        repetitions = 0.02 if size > common.kMiB else 0.1 if quick else 0.3
        results[f"allreduce {common.format_bytes(size)}"] = time_us(
            lambda t=tensor: library.allreduce(t), library.barrier, repetitions
        )
    tensors = [torch.zeros(kManyBytes // 4) for _ in range(kManyCount)]
    orders = itertools.cycle(
        [random.Random(f"{library.rank} {round_index} {i}").sample(range(kManyCount), kManyCount) for i in range(10)]
    )
    results[f"{kManyCount} x {common.format_bytes(kManyBytes)}"] = time_us(
        lambda: library.many(tensors, next(orders)), library.barrier, 0.01
    )
    for model in kModels:
        results |= measure_step(library, model, 4 if quick else 10)
    everyones = library.gather(results)
    library.close()
    return library.rank, {case: statistics.median(one[case] for one in everyones) for case in results}


def measure_step(library: Any, model_name: str, blocks: int) -> Results:
    """Medians over blocks of the time of a step without communication / with it; they take turns."""
    import torch
    from ddp_step import make_model
    from torch import nn

    variants: dict[str, Any] = {}
    for name in ("alone", "wait", "step"):
        model, make_batch = make_model(model_name)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if name == "step":
            model, optimizer = library.wrap(model, optimizer)
        torch.manual_seed(library.rank + 1)
        variants[name] = (model, optimizer, itertools.cycle([make_batch() for _ in range(4)]))

    def step(name: str) -> float:
        model, optimizer, batches = variants[name]
        inputs, targets = next(batches)
        started = time.perf_counter_ns()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if name == "wait":
            library.barrier()
        optimizer.step()
        return (time.perf_counter_ns() - started) / 1e3

    for name in variants:
        for _ in range(3):
            step(name)
    ratios: dict[str, list[float]] = {"wait": [], "step": []}
    for _ in range(blocks):
        medians = {}
        for name in variants:
            library.barrier()
            medians[name] = statistics.median([step(name) for _ in range(kLeadInSteps + 4)][kLeadInSteps:])
        for name, found in ratios.items():
            found.append(medians["alone"] / medians[name])
    return {f"{name} {model_name}": statistics.median(found) for name, found in ratios.items()}


def worker_main(arguments: argparse.Namespace) -> int:
    rank, results = measure(arguments.worker, arguments.round, arguments.quick)
    if rank == 0:
        arguments.out.write_text(json.dumps(results))
    if arguments.worker == "gloo":
        # Gloo's threads may hold the last share of what backward() left in Python, and abort the process at its end
        # (see Note [Kept contexts] in torch_backend/kept_context.h). The figures are written.
        os._exit(0)
    return 0


def run_round(contender: str, arguments: argparse.Namespace, round_index: int) -> Results:
    """Starts the ranks of one contender, and returns what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        program = [str(_HERE / "horovod_peer.py"), "--worker", contender, "--round", str(round_index)]
        program += ["--out", str(out), *(["--quick"] if arguments.quick else [])]
        n = str(arguments.ranks)
        if contender == "horovod":
            python = arguments.peers / "bin" / "python"
            launcher = str(python.with_name("horovodrun"))
            command = [launcher, "--gloo", "-np", n, "-H", f"localhost:{n}", str(python), *program]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=arguments.timeout, check=False
        )
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"{contender} ended with {done.returncode}: {done.stdout[-1000:]} {done.stderr[-3000:]}")
        found: Results = json.loads(out.read_text())
        return found


def report(rounds: dict[str, list[Results]], arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    contenders = list(rounds)
    cases = list(next(iter(rounds.values()))[0])
    medians = {c: {case: statistics.median(r[case] for r in rounds[c]) for case in cases} for c in contenders}
    spreads = {
        c: {case: (min(r[case] for r in rounds[c]), max(r[case] for r in rounds[c])) for case in cases}
        for c in contenders
    }
    rows = []
    for case in cases:
        is_share = case.startswith(("step", "wait"))
        row = [case + ("" if is_share else " (us)")]
        for contender in contenders:
            low, high = spreads[contender][case]
            form = "{:.1%}" if is_share else "{:.1f}"
            row.append(f"{form.format(medians[contender][case])} ({form.format(low)} to {form.format(high)})")
        for other in contenders[1:]:
            ours, theirs = medians[contenders[0]][case], medians[other][case]
            row.append(f"{ours / theirs if is_share else theirs / ours:.1f} x")
        rows.append(row)
    title = f"{arguments.ranks} ranks on {machine['cores']} cores, median (lowest to highest of the rounds)"
    common.print_table(title, ["case", *contenders, *(f"horon / {other}" for other in contenders[1:])], rows)
    if arguments.json:
        document = {"machine": machine, "benchmark": "horovod_peer", "ranks": arguments.ranks}
        document.update(medians=medians, rounds=rounds)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot:
        from plots import plot_cases

        plot_cases(arguments.plot, f"{arguments.ranks} ranks, {machine['cpu']}", medians)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default=",".join(kContenders))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="what build_peers.sh made")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one contender's round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an image of times and speeds; needs matplotlib")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        return worker_main(arguments)
    contenders = [name for name in arguments.contenders.split(",") if name]
    if "horovod" in contenders and not (arguments.peers / "bin" / "horovodrun").exists():
        print(f"skipped: horovod: not in {arguments.peers}; make it with: benchmarks/build_peers.sh {arguments.peers}")
        contenders.remove("horovod")
    rounds: dict[str, list[Results]] = {contender: [] for contender in contenders}
    for index in range(arguments.rounds):
        for contender in contenders[index % len(contenders) :] + contenders[: index % len(contenders)]:
            rounds[contender].append(run_round(contender, arguments, index))
    report(rounds, arguments, common.machine_info("benchmarks/horovod_peer.py"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
