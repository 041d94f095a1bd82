"""How benchmarks/gpu.py times: turns, host time, time until the GPU has finished, and time on the GPU alone."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import common
import torch
import torch.distributed as dist

kWarmUps = 3
kSleepCycles = 2_000_000  # of the GPU's clock, a millisecond: meanwhile the host queues what is timed on the GPU


@dataclass(frozen=True)
class Contender:
    """Something that takes turns. `prepare` is not timed; `check` runs once, after the warm-ups, and raises."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None
    n_bytes: int = 0


@dataclass
class Samples:
    """Of one contender, on one rank, in ns."""

    host: list[float]
    total: list[float]
    device: list[float]


def take_turns(contenders: Sequence[Contender], rounds: int, *, on_device: bool = False) -> dict[str, Samples]:
    """Runs all contenders once per round, in random order; all ranks start a turn together.

    host is the time until the call has returned, total the time until the GPU has finished as well. With `on_device`
    each turn runs a second time behind a kernel that only waits, so that events see the GPU's work without the host's.
    """
    for contender in contenders:
        for _ in range(kWarmUps):
            _meet(contender)
            contender.run()
        torch.cuda.synchronize()
        contender.check()
    samples = {contender.name: Samples([], [], []) for contender in contenders}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # The same on all ranks. One that always came behind the same other would have its caches and clocks.
            for contender in random.Random(number).sample(contenders, len(contenders)):
                mine = samples[contender.name]
                _meet(contender)
                started = time.perf_counter_ns()
                contender.run()
                returned = time.perf_counter_ns()
                torch.cuda.synchronize()
                mine.host.append(returned - started)
                mine.total.append(time.perf_counter_ns() - started)
                if on_device:
                    mine.device.append(_device_ns(contender))
    finally:
        gc.enable()
    return samples


def _meet(contender: Contender) -> None:
    contender.prepare()
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()  # The default group, which is Gloo's: the GPU has no part in it.


def _device_ns(contender: Contender) -> float:
    contender.prepare()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(kSleepCycles)
    begin.record()
    contender.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6


@dataclass(frozen=True)
class Cell:
    """One contender of one table, over the samples of all ranks. Microseconds; None: not taken."""

    table: str
    contender: str
    n_ranks: int
    n_bytes: int
    samples: int
    host_us: float
    host_p99_us: float
    total_us: float
    total_p99_us: float
    device_us: float | None
    device_p99_us: float | None
    totals_us: list[float] | None = None  # of rank 0, a round each: to compare two contenders round by round


def cells(
    table: str, contenders: Sequence[Contender], mine: Mapping[str, Samples], *, keep_totals: bool = False
) -> list[Cell]:
    """Pools the samples of all ranks; every rank has to call it."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    everyones: list[Any] = [None] * n_ranks
    plain = {name: asdict(samples) for name, samples in mine.items()}
    if dist.is_initialized():
        dist.all_gather_object(everyones, plain)
    else:
        everyones = [plain]
    return [
        _cell(table, contender, n_ranks, [one[contender.name] for one in everyones], keep_totals)
        for contender in contenders
    ]


def _cell(
    table: str, contender: Contender, n_ranks: int, ranks: Sequence[Mapping[str, list[float]]], keep_totals: bool
) -> Cell:
    def pooled(kind: str) -> list[float]:
        return sorted(ns / 1e3 for rank in ranks for ns in rank[kind])

    host, total, device = pooled("host"), pooled("total"), pooled("device")
    return Cell(
        table=table,
        contender=contender.name,
        n_ranks=n_ranks,
        n_bytes=contender.n_bytes,
        samples=len(host),
        host_us=statistics.median(host),
        host_p99_us=common.quantile(host, 0.99),
        total_us=statistics.median(total),
        total_p99_us=common.quantile(total, 0.99),
        device_us=statistics.median(device) if device else None,
        device_p99_us=common.quantile(device, 0.99) if device else None,
        totals_us=[round(ns / 1e3, 1) for ns in ranks[0]["total"]] if keep_totals else None,
    )
