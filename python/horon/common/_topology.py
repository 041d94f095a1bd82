"""Who shares my node? Local and cross ranks, from what every rank says about itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from horon.common._launch import Launch

_LOOK_AROUND_S = 1.0
"""How often ranks that wait look whether the others are alive."""


@dataclass(frozen=True)
class Topology:
    """This rank among the others, in Horovod's terms.

    A node is what shares a launcher's idea of one, else a host name. `cross_rank` and `cross_size` count the nodes
    that have a rank with this rank's local rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass(frozen=True)
class Place:
    """What one rank says about itself."""

    node: str
    local_rank: int | None
    local_size: int | None

    def encode(self) -> str:
        numbers = ("" if n is None else str(n) for n in (self.local_rank, self.local_size))
        return "\n".join((*numbers, self.node))

    @classmethod
    def decode(cls, text: str) -> Place:
        local_rank, local_size, node = text.split("\n", 2)
        return cls(node, int(local_rank) if local_rank else None, int(local_size) if local_size else None)


def exchange_places(
    store: Any, rank: int, size: int, mine: Place, timeout: timedelta, check_alive: Callable[[], None]
) -> list[Place]:
    """Tells all ranks where this one is, and waits for all of them.

    The store is asked again and again: its wait() would notice neither a death nor Ctrl-C.

    Args:
        check_alive: Called now and then; raises if a rank has died.

    Raises:
        RuntimeError: Some did not come within `timeout`; names them.
    """
    store.set(f"place/{rank}", mine.encode())
    keys = [f"place/{other}" for other in range(size)]
    began_s = looked_s = time.monotonic()
    while not _have_come(store, keys, timeout, check_alive):
        now_s = time.monotonic()
        if now_s >= began_s + timeout.total_seconds():
            missing = [r for r in range(size) if not store.check([f"place/{r}"])]
            if not missing:
                break
            raise RuntimeError(
                f"horon: hvd.init: rank {rank} waited for {timeout.total_seconds():g} s for rank(s) {missing}, which "
                "did not call it. All ranks of the group have to; HORON_TIMEOUT_SECONDS sets how long they wait."
            )
        if now_s >= looked_s + _LOOK_AROUND_S:
            check_alive()
            looked_s = now_s
        time.sleep(min(max((now_s - began_s) / 4, 0.0001), 0.25))
    return [Place.decode(store.get(f"place/{other}").decode()) for other in range(size)]


def _have_come(store: Any, keys: list[str], timeout: timedelta, check_alive: Callable[[], None]) -> bool:
    try:
        return bool(store.check(keys))
    except RuntimeError:
        check_alive()  # a store that fails may have been served by a rank that has died
        store.wait(keys, timeout)  # says what is wrong; or is of a kind that can only wait
        return True


def derive_topology(rank: int, places: Sequence[Place], launch: Launch | None = None) -> Topology:
    """Computes the topology. What the launcher says wins over what is counted."""
    nodes = list(dict.fromkeys(place.node for place in places))
    members = {node: [r for r, place in enumerate(places) if place.node == node] for node in nodes}

    def local_rank_of(r: int) -> int:
        said = places[r].local_rank
        return members[places[r].node].index(r) if said is None else said

    def local_size_of(r: int) -> int:
        said = places[r].local_size
        return len(members[places[r].node]) if said is None else said

    mine = local_rank_of(rank)
    peers = [node for node in nodes if any(local_rank_of(r) == mine for r in members[node])]
    said_rank = launch.cross_rank if launch else None
    said_size = launch.cross_size if launch else None
    return Topology(
        rank=rank,
        size=len(places),
        local_rank=mine,
        local_size=local_size_of(rank),
        cross_rank=peers.index(places[rank].node) if said_rank is None else said_rank,
        cross_size=len(peers) if said_size is None else said_size,
        is_homogeneous=len({local_size_of(r) for r in range(len(places))}) == 1,
    )


def this_host(host_name: str) -> str:
    """A name that ranks of one running system share: the host's, and the kernel's id of this boot."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{host_name}/{boot_id.read_text().strip()}" if boot_id.exists() else host_name
