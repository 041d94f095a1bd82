"""Ranks of benchmarks/gpu.py: several on one GPU, and the groups that they compare."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ranks
import torch
import torch.distributed as dist

_NCCL_WITH_SEVERAL_RANKS_PER_GPU = (2, 30)
_TORCH_WITH_NCCL2 = (2, 15)


@dataclass(frozen=True)
class Job:
    """What a rank runs: `function(rank, n_ranks, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run(job: Job, n_ranks: int, timeout_seconds: float) -> Any:
    """Runs a job on fresh processes whose default group is Gloo's; returns what rank 0 returned."""
    return ranks.run_on_ranks(_on_rank, n_ranks, job, timeout_seconds=timeout_seconds)


def _on_rank(rank: int, n_ranks: int, job: Job) -> Any:
    os.environ.update(environment_of(rank))
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return job.function(rank, n_ranks, *job.arguments)


def environment_of(rank: int) -> dict[str, str]:
    """Returns what lets several ranks use one GPU: NCCL takes them for other hosts', or from 2.30 on is told so."""
    if torch.cuda.nccl.version() >= _NCCL_WITH_SEVERAL_RANKS_PER_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return {"NCCL_HOSTID": f"horon-bench-host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def has_nccl2() -> bool:
    """Whether "nccl" is the new backend here, and "nccl-legacy" the old one."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return version >= _TORCH_WITH_NCCL2 and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


def backends() -> list[str]:
    """Returns the backends that are compared; the first is horon's."""
    return ["horon", "nccl", *(["nccl-legacy"] if has_nccl2() else [])]


def new_groups() -> dict[str, dist.ProcessGroup]:
    """Returns a group of all ranks on each backend."""
    return {name: dist.new_group(backend=name) for name in backends()}  # type: ignore[misc]
