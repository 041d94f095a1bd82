"""Times a training step under DistributedDataParallel: the bare model without communication, Gloo, horon, the arena.

    python benchmarks/ddp_step.py --json ddp_step.json --plot ddp_step.png

Two models: an MLP of 8.55 million parameters, whose gradients fill several buckets, and 100 small layers with 0.43
million parameters, where the calls matter. Every rank has one thread. The variants live in the same processes, each
with its own copy of the model, and take turns, block by block; all ranks start a block together.

    bare         no DDP and no communication: both processes train for themselves, at the same time
    noop         DDP on a backend that does nothing: what DDP itself costs
    gloo, horon  DDP on that backend, unmodified
    horon-arena  DDP on horon, with horon.ddp_in_arena(model)
    horon-after  the same with HORON_REDUCE_WHILE_MADE=off; on request
    meet         bare, but the ranks wait for each other after each backward pass, by a counter in shared memory: what
                 it costs on this machine that one of them is slower; on request

Speed is the median over the rounds of bare's step / the variant's step, each the median of its block on all ranks.
`alone` is the time of all-reducing tensors of the buckets' sizes with nothing else to do; `exposed` is how much longer
the step is than noop's (without noop: than bare's); what is not exposed was hidden behind the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import noop
import ranks
import torch
import torch.distributed as dist
from contenders import Unavailable, new_group
from torch import nn

kVariants = ("bare", "noop", "gloo", "horon", "horon-arena")
kOnRequest = ("horon-after", "meet")
kReduceNothing = ("bare", "meet", "noop")
kInArena = ("horon-arena", "horon-after")
kModels = ("mlp", "small-layers")
kMlpSizes: tuple[int, ...] = (1024, 2048, 2048, 1024, 150)
kMlpBatch = 64
kSmallLayers = 100
kSmallWidth = 65
kSmallBatch = 32
kWarmUpSteps = 20  # DDP lays its buckets out anew, horon tries out what is faster
kLeadInSteps = 1  # of a block, not counted: the caches still hold another variant's model


@dataclass(frozen=True)
class Plan:
    """What the ranks are asked to measure."""

    models: tuple[str, ...]
    variants: tuple[str, ...]
    rounds: int
    block_steps: int
    gradient_as_bucket_view: bool


@dataclass(frozen=True)
class Step:
    """When the parts of one step were over, in ms from its start."""

    forward_ms: float
    backward_ms: float
    total_ms: float


@dataclass(frozen=True)
class Result:
    """One variant of one model, over all ranks."""

    model: str
    variant: str
    parameters: int
    step_ms: float
    step_p99_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    speed_of_bare: float
    bucket_bytes: list[int]
    alone_ms: float | None
    exposed_ms: float | None
    samples: int

    @property
    def hidden(self) -> float | None:
        """Returns which part of the communication cost no time."""
        if self.alone_ms is None or self.exposed_ms is None:
            return None
        return min(1.0, max(0.0, 1 - self.exposed_ms / self.alone_ms))


def make_model(name: str, rows: int | None = None) -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Returns the model, the same on all ranks, and what makes a batch of inputs and targets, with other `rows`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    if name == "mlp":
        sizes, batch = kMlpSizes, kMlpBatch
    else:
        sizes, batch = (kSmallWidth,) * (kSmallLayers + 1), kSmallBatch
    for n_inputs, n_outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(n_inputs, n_outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    batch = rows or batch
    return model, lambda: (torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1]))


class Variant:
    """A model with its optimizer, and what is between them."""

    def __init__(self, name: str, model_name: str, plan: Plan) -> None:
        self.name = name
        self.group: dist.ProcessGroup | None = None
        self.empty: Callable[[int], torch.Tensor] = torch.empty
        self.module, self._make_batch = make_model(model_name)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        if name == "meet":
            self.group = self._new_noop_group("noop-meet")
        elif name != "bare":
            self._wrap(name, plan.gradient_as_bucket_view)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank() + 1)  # every rank has its own data
        self._batches = itertools.cycle([self._make_batch() for _ in range(4)])

    def _wrap(self, name: str, gradient_as_bucket_view: bool) -> None:
        if name in kInArena:
            import horon

            for needed in ("ddp_in_arena", "empty"):
                if not hasattr(horon, needed):
                    raise Unavailable(f"this horon has no horon.{needed}")
        in_arena = name in kInArena
        self.group = self._new_noop_group(name) if name == "noop" else new_group("horon" if in_arena else name)
        ddp = nn.parallel.DistributedDataParallel(
            self.module, process_group=self.group, gradient_as_bucket_view=gradient_as_bucket_view
        )
        if name in kInArena:
            import horon

            horon.ddp_in_arena(ddp)
            self.empty = horon.empty
        self.module = ddp

    @staticmethod
    def _new_noop_group(name: str) -> dist.ProcessGroup:
        if not noop.is_built():
            raise Unavailable("its C++ part did not compile")
        return new_group(name)

    def step(self) -> Step:
        inputs, targets = next(self._batches)
        now = time.perf_counter_ns
        started = now()
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.module(inputs), targets)
        after_forward = now()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.name == "meet":
            dist.barrier(self.group)
        after_backward = now()
        self._optimizer.step()
        ended = now()
        return Step((after_forward - started) / 1e6, (after_backward - started) / 1e6, (ended - started) / 1e6)

    def bucket_bytes(self) -> list[int]:
        """Returns what DDP reduces at once; valid after two steps, when it has rebuilt its buckets."""
        if not isinstance(self.module, nn.parallel.DistributedDataParallel):
            return []
        data = self.module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        return [int(size) for size in str(sizes).split(",") if size.strip()]

    def check(self) -> None:
        """Raises unless all ranks have the same parameters."""
        if self.name in kReduceNothing:
            return
        mine = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{self.name}: rank {dist.get_rank()} has other parameters than rank 0")


class Communication:
    """The all-reduces of a variant's buckets, with nothing beside them."""

    def __init__(self, variant: Variant) -> None:
        self._group = variant.group
        self._tensors = [variant.empty(size // 4).zero_() for size in variant.bucket_bytes()]

    def run_ms(self) -> float:
        started = time.perf_counter_ns()
        works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in self._tensors]
        for work in works:
            work.wait()
        return (time.perf_counter_ns() - started) / 1e6

    def rewrite(self) -> None:
        for tensor in self._tensors:
            tensor.fill_(1)


def measure(rank: int, n_ranks: int, plan: Plan) -> tuple[list[Result], dict[str, str]]:
    """Runs on every rank; rank 0's results count."""
    results: list[Result] = []
    skipped: dict[str, str] = {}
    for model in plan.models:
        results += _measure_model(model, plan, n_ranks, skipped)
    return results, skipped


def _measure_model(model: str, plan: Plan, n_ranks: int, skipped: dict[str, str]) -> list[Result]:
    variants: list[Variant] = []
    for name in plan.variants:
        try:
            variants.append(Variant(name, model, plan))
        except Unavailable as error:
            skipped[name] = str(error)
    for variant in variants:
        os.environ["HORON_REDUCE_WHILE_MADE"] = "off" if variant.name == "horon-after" else "on"
        for _ in range(kWarmUpSteps):
            variant.step()
        variant.check()
    talking = {v.name: Communication(v) for v in variants if v.name not in kReduceNothing}

    steps: dict[str, list[list[Step]]] = {variant.name: [] for variant in variants}  # by round
    alone_ms: dict[str, list[float]] = {name: [] for name in talking}
    gc.collect()
    gc.disable()
    for round_index in range(plan.rounds):
        first = round_index % len(variants)  # nobody always follows the same one
        for variant in variants[first:] + variants[:first]:
            dist.barrier()
            steps[variant.name].append([variant.step() for _ in range(kLeadInSteps + plan.block_steps)][kLeadInSteps:])
        for name, communication in talking.items():
            communication.rewrite()
            dist.barrier()
            alone_ms[name].append([communication.run_ms() for _ in range(2)][1])
    gc.enable()
    for variant in variants:
        variant.check()

    everyones: list[Any] = [None] * n_ranks
    dist.all_gather_object(everyones, (steps, alone_ms))
    pooled = {
        name: [[step for one in everyones for step in one[0][name][r]] for r in range(plan.rounds)] for name in steps
    }
    pooled_alone = {name: [ms for one in everyones for ms in one[1][name]] for name in alone_ms}
    return [_summarize(model, variant, pooled, pooled_alone.get(variant.name)) for variant in variants]


def _summarize(
    model: str, variant: Variant, rounds_of: dict[str, list[list[Step]]], alone_ms: list[float] | None
) -> Result:
    def block_medians(name: str) -> list[float]:
        return [statistics.median(step.total_ms for step in block) for block in rounds_of[name]]

    def median_difference(reference: str) -> float:
        return statistics.median(
            a - b for a, b in zip(block_medians(variant.name), block_medians(reference), strict=True)
        )

    steps = [step for block in rounds_of[variant.name] for step in block]
    ordered = sorted(step.total_ms for step in steps)
    reference = "noop" if "noop" in rounds_of else "bare"
    ratios = [a / b for a, b in zip(block_medians("bare"), block_medians(variant.name), strict=True)]
    return Result(
        model=model,
        variant=variant.name,
        parameters=variant.parameters,
        step_ms=statistics.median(ordered),
        step_p99_ms=common.quantile(ordered, 0.99),
        forward_ms=statistics.median(step.forward_ms for step in steps),
        backward_ms=statistics.median(step.backward_ms - step.forward_ms for step in steps),
        optimizer_ms=statistics.median(step.total_ms - step.backward_ms for step in steps),
        speed_of_bare=statistics.median(ratios),
        bucket_bytes=variant.bucket_bytes(),
        alone_ms=None if alone_ms is None else statistics.median(alone_ms),
        exposed_ms=None if alone_ms is None else median_difference(reference),
        samples=len(steps),
    )


def report(results: Sequence[Result], arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    columns = ["model", "variant", "step ms", "p99", "forward", "backward", "optimizer", "of bare's speed"]
    columns += ["buckets", "alone ms", "exposed ms", "hidden"]

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            f"{r.model} ({r.parameters / 1e6:.2f} M)",
            r.variant,
            *(f"{ms:.2f}" for ms in (r.step_ms, r.step_p99_ms, r.forward_ms, r.backward_ms, r.optimizer_ms)),
            f"{r.speed_of_bare:.1%}",
            str(len(r.bucket_bytes)) if r.bucket_bytes else "-",
            optional(r.alone_ms, ".2f"),
            optional(r.exposed_ms, ".2f"),
            optional(r.hidden, ".0%"),
        ]
        for r in results
    ]
    view = ", gradient_as_bucket_view" if arguments.bucket_view else ""
    title = f"training step{view}, {arguments.ranks} ranks on {machine['cores']} cores, torch {machine['torch']}"
    common.print_table(title, columns, rows)
    if arguments.json:
        document = {"machine": machine, "benchmark": "ddp_step", "ranks": arguments.ranks}
        document["gradient_as_bucket_view"] = arguments.bucket_view
        document["results"] = [{**asdict(r), "hidden": r.hidden} for r in results]
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot:
        from plots import plot_speeds

        speeds = {
            model: {r.variant: r.speed_of_bare for r in results if r.model == model} for model in arguments.models
        }
        plot_speeds(arguments.plot, f"{title}, {machine['cpu']}", speeds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(kModels))
    parser.add_argument("--variants", default=",".join(kVariants), help="bare is always measured")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each variant")
    parser.add_argument("--block-steps", type=int, default=4, help="steps of a block that are counted")
    parser.add_argument(
        "--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True: fewer copies"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds until the ranks are killed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    arguments.models = [model for model in arguments.models.split(",") if model]
    arguments.variants = list(dict.fromkeys(["bare", *(name for name in arguments.variants.split(",") if name)]))
    for option, chosen, known in (
        ("models", arguments.models, kModels),
        ("variants", arguments.variants, kVariants + kOnRequest),
    ):
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option}: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    machine = common.machine_info("benchmarks/ddp_step.py")
    if {"noop", "meet"} & set(arguments.variants):
        os.environ.update(noop.environment())
    plan = Plan(
        tuple(arguments.models),
        tuple(arguments.variants),
        arguments.rounds,
        arguments.block_steps,
        arguments.bucket_view,
    )
    started = time.monotonic()
    try:
        results, skipped = ranks.run_on_ranks(measure, arguments.ranks, plan, timeout_seconds=arguments.timeout)
    except ranks.RankFailed as error:
        print(f"ddp_step: {error}; all ranks have been ended", file=sys.stderr)
        return 1
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    report(results, arguments, machine)
    print(f"\nmeasured in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
