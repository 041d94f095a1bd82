"""Groups whose ranks count as those of several hosts, on one machine: HORON_HOST_ID says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank: int, hosts: list[int], path: str, timeout_s: float = 60) -> None:
    """Makes the default group, of `len(hosts)` ranks.

    Args:
        hosts: The host of each rank.
        path: Of the file that the ranks meet with.
    """
    os.environ["HORON_HOST_ID"] = f"host{hosts[rank]}"
    dist.init_process_group(
        "horon",
        init_method=f"file://{path}",
        rank=rank,
        world_size=len(hosts),
        timeout=timedelta(seconds=timeout_s),
    )


@contextmanager
def group_over_hosts(
    rank: int, hosts: list[int], path: str, timeout_s: float = 30, expected: str = ""
) -> Iterator[None]:
    """The default group, in a process that may have others before and after it.

    Args:
        hosts, path: As in join().
        expected: Its transport, where that is not what the environment asks for.
    """
    try:
        join(rank, hosts, path, timeout_s)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert not backend.is_shared
        carrier = os.environ.get("HORON_CARRIER", "tcp")
        is_flat = len(set(hosts)) == len(hosts) or os.environ.get("HORON_HIERARCHICAL") == "off"
        assert backend.transport == (expected or (carrier if is_flat else f"hosts, {carrier}"))
        yield
        dist.destroy_process_group()
    finally:
        del os.environ["HORON_HOST_ID"]
