"""What agreeing on many known names costs, beyond reducing their tensors.

    torchrun --standalone --nproc-per-node 2 benchmarks/negotiation.py

200 names are announced, the last of them later than the others: from its announcement to the results of all 200. In
`late` only rank 0 is late, and the others wait; in `all` every rank submits all 200 at once. `reduction` is one
allreduce of the same bytes under one name. Times in microseconds, as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import horon.torch as hvd
import torch

kNames = 200


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--elements", type=int, default=1, help="of each tensor, float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    tensors = [torch.zeros(arguments.elements) for _ in range(kNames)]
    together = torch.zeros(kNames * arguments.elements)
    names = [f"t{i}" for i in range(kNames)]
    times: dict[str, list[float]] = {"late": [], "all": [], "reduction": []}
    gc.disable()
    for index in range(arguments.rounds + 10):
        hvd.barrier()
        handles = [hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=names[i]) for i in range(kNames - 1)]
        if hvd.rank() == 0:
            time.sleep(0.005)  # the others have announced everything, and wait
        started = time.perf_counter_ns()
        handles.append(hvd.allreduce_async_(tensors[-1], op=hvd.Sum, name=names[-1]))
        hvd.synchronize(handles[-1])
        late = time.perf_counter_ns() - started
        for handle in handles[:-1]:
            hvd.synchronize(handle)
        hvd.barrier()
        started = time.perf_counter_ns()
        handles = [hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=names[i]) for i in range(kNames)]
        for handle in handles:
            hvd.synchronize(handle)
        everything = time.perf_counter_ns() - started
        hvd.barrier()
        started = time.perf_counter_ns()
        hvd.allreduce_(together, op=hvd.Sum, name="together")
        alone = time.perf_counter_ns() - started
        if index >= 10:
            for case, elapsed in zip(times, (late, everything, alone), strict=True):
                times[case].append(elapsed / 1e3)
    if hvd.rank() == 0:
        print(f"{kNames} names of {4 * arguments.elements} B, {hvd.size()} ranks; median / p99 (us)")
        for case, found in times.items():
            print(f"{case:>10} {statistics.median(found):9.1f} / {percentile(found, 0.99):9.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
