"""Where a training step with hvd.DistributedOptimizer spends its time, phase by phase, and what its floor is.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_phases.py --model mlp

The variants take turns, in blocks: `alone` communicates nothing, `wait` has a barrier between backward pass and
optimizer step, `scale` also multiplies each gradient in place as soon as it is made (one pass over it, as any reduction
in place takes at least that comes after that, without another rank's data), `step` is hvd.DistributedOptimizer, `after`
the same with HORON_REDUCE_WHILE_MADE=off: gradients are made first, and then reduced. The floor is timed between
them, on memory of the gradients' size: `mul_` in place loads and stores each byte once on each rank, which is the least
that a reduction in place has to do; `all_reduce` is horon's, of one tensor in the arena. All times are medians, in
milliseconds, of the slower rank.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import horon
import horon.torch as hvd
import torch
import torch.distributed as dist
from ddp_step import make_model
from torch import nn

kVariants = ("alone", "wait", "scale", "after", "step")
kPhases = ("zero_grad", "forward", "backward", "communication", "optimizer", "all")
kStepsPerBlock = 4
kWarmup = 20  # of which 16 try out what is faster


def scale_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


class Variant:
    """A model of its own, and its steps."""

    def __init__(self, name: str, model_name: str, rows: int | None) -> None:
        self._name = name
        self._model, make_batch = make_model(model_name, rows)
        self._optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._reduces = name in ("step", "after")
        if self._reduces:
            named = ((f"{name}.{which}", parameter) for which, parameter in self._model.named_parameters())
            self._optimizer = hvd.DistributedOptimizer(self._optimizer, named_parameters=named)
        elif name == "scale":
            for parameter in self._model.parameters():
                parameter.register_post_accumulate_grad_hook(scale_gradient)
        torch.manual_seed(hvd.rank() + 1)
        self._batches: Iterator[Any] = itertools.cycle([make_batch() for _ in range(4)])

    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def step(self) -> list[float]:
        """The milliseconds of each phase, and of all of them."""
        inputs, targets = next(self._batches)
        times = [time.perf_counter_ns()]
        self._optimizer.zero_grad()
        times.append(time.perf_counter_ns())
        loss = nn.functional.mse_loss(self._model(inputs), targets)
        times.append(time.perf_counter_ns())
        loss.backward()
        times.append(time.perf_counter_ns())
        if self._name in ("wait", "scale"):
            hvd.barrier()
        elif self._reduces:
            self._optimizer.synchronize()
        times.append(time.perf_counter_ns())
        if self._reduces:
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
        else:
            self._optimizer.step()
        times.append(time.perf_counter_ns())
        return [(after - before) / 1e6 for before, after in [*itertools.pairwise(times), (times[0], times[-1])]]


def timed_ms(function: Callable[[], Any]) -> float:
    hvd.barrier()
    started = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - started) / 1e6


def measure(model_name: str, blocks: int, rows: int | None) -> dict[str, list[list[float]]]:
    """By variant, or "floor": one row of times for each step."""
    variants = {name: Variant(name, model_name, rows) for name in kVariants}
    rows: dict[str, list[list[float]]] = {name: [] for name in (*kVariants, "floor")}
    elements = variants["step"].gradient_bytes() // 4
    tensors = itertools.cycle([horon.empty(elements).fill_(1) for _ in range(4)])  # more than the caches hold
    for name, variant in variants.items():
        os.environ["HORON_REDUCE_WHILE_MADE"] = "off" if name == "after" else "on"  # read in the first step
        for _ in range(kWarmup):
            variant.step()
    gc.collect()
    gc.disable()
    for _ in range(blocks):
        for name, variant in variants.items():
            hvd.barrier()
            variant.step()
            rows[name] += [variant.step() for _ in range(kStepsPerBlock)]
        for _ in range(kStepsPerBlock):
            multiply = timed_ms(lambda: next(tensors).mul_(1.0))
            rows["floor"].append([multiply, timed_ms(lambda: dist.all_reduce(next(tensors)))])
    return rows


def slower_rank(everyones: list[dict[str, list[list[float]]]], name: str) -> list[float]:
    """The medians of the rank whose last column is the larger."""
    medians = [[statistics.median(column) for column in zip(*rows[name], strict=True)] for rows in everyones]
    return max(medians, key=lambda row: row[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "small-layers"), default="mlp")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows of a batch (default: 64, small-layers 16)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    everyones = hvd.allgather_object(measure(arguments.model, arguments.blocks, arguments.batch))
    if hvd.rank() == 0:
        rows = []
        alone = slower_rank(everyones, "alone")[-1]
        for name in kVariants:
            medians = slower_rank(everyones, name)
            rows.append([name, *(f"{median:.2f}" for median in medians), f"{alone / medians[-1]:.1%}"])
        common.print_table(f"{arguments.model}: a step, ms", ["variant", *kPhases, "of alone's speed"], rows)
        multiply, reduction = slower_rank(everyones, "floor")
        size = Variant("alone", arguments.model, None).gradient_bytes() / 1e6
        print(f"floor, {size:.1f} MB: mul_ on both ranks {multiply:.2f} ms, all_reduce in the arena {reduction:.2f} ms")
    hvd.shutdown()


if __name__ == "__main__":
    main()
