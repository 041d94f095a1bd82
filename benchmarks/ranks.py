"""Starts the ranks of a benchmark as processes of this one: no launcher, no port, nothing left behind."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Worker = Callable[[int, int, Any], Any]
"""`worker(rank, ranks, arguments)`, a module-level function; the default group (Gloo) exists when it is called."""

_GROUP_TIMEOUT = datetime.timedelta(seconds=60)


class RankFailed(RuntimeError):
    """A rank ended badly, or the ranks took too long; all of them have been killed."""


def run_on_ranks(worker: Worker, ranks: int, arguments: Any, *, timeout_seconds: float) -> Any:
    """Runs `worker` in `ranks` fresh processes with one torch thread each, and returns what rank 0 returned.

    Raises:
        RankFailed: A rank died, raised (its traceback is on stderr), or the time was over.
    """
    for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[threads] = "1"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(
                target=_rank_main,
                args=(worker, rank, ranks, arguments, store, sender if rank == 0 else None),
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            sender.close()
            return _collect(processes, receiver, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                if process.pid is not None and process.exitcode is None:
                    process.kill()
                    process.join()


def _collect(processes: list[Any], receiver: Any, deadline: float) -> Any:
    results: list[Any] = []
    waiting: list[Any] = [receiver]
    # Asked once in each round: between two looks the last one may end, and a wait for nothing would last.
    while (running := [process for process in processes if process.exitcode is None]) or waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankFailed("timeout: " + ", ".join(f"rank {processes.index(p)} was still running" for p in running))
        ready = multiprocessing.connection.wait([*waiting, *(p.sentinel for p in running)], timeout=left)
        if receiver in ready:
            waiting = []
            with contextlib.suppress(EOFError):  # rank 0 ended without a result; its exit code says why
                results.append(receiver.recv())
        for rank, process in enumerate(processes):
            if process.exitcode not in (None, 0):
                raise RankFailed(f"rank {rank} ended with exit code {process.exitcode}")
    if not results:
        raise RankFailed("rank 0 returned nothing")
    return results[0]


def _rank_main(worker: Worker, rank: int, ranks: int, arguments: Any, store: Path, sender: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_GROUP_TIMEOUT)
    result = worker(rank, ranks, arguments)
    if sender is not None:
        sender.send(result)
        sender.close()
    dist.destroy_process_group()
