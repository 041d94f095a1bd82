"""Process sets: groups of ranks that run collectives of their own. Source: Horovod 0.28.1 ``common.process_sets``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horon.common._context import default_context
from horon.common.util import is_iterable

_EXPECTED = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"


class ProcessSet:
    """A set of ranks that run collectives together.

    Made from a list of ranks, then given to :func:`horon.torch.init` or :func:`add_process_set`, which fill in its id.

    Args:
        ranks_or_comm: Global ranks, in any order, or an mpi4py communicator (its ranks in MPI_COMM_WORLD).

    Attributes:
        process_set_id: None until the set was added, and after it was removed or horon was shut down.
        ranks: Sorted global ranks.

    Raises:
        ValueError: Something else than ranks or a communicator.

    Source: Horovod 0.28.1 ``ProcessSet``.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if is_iterable(ranks_or_comm):
            ranks = list(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in ranks):
                raise ValueError(_EXPECTED)
            self.ranks = sorted(ranks)
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            self.ranks = sorted(_world_ranks(ranks_or_comm))
        else:
            raise ValueError(_EXPECTED)

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """The number of ranks in the set, or None if it was not added. Source: Horovod 0.28.1 ``ProcessSet.size``."""
        if self.process_set_id is None:
            return None
        return len(self._current_ranks())

    def rank(self) -> int | None:
        """This process's index in the set, or None if the set was not added.

        Operations take global ranks all the same, :func:`horon.torch.broadcast` for instance.

        Raises:
            ValueError: This process is not in the set, or horon is not initialised.

        Source: Horovod 0.28.1 ``ProcessSet.rank``.
        """
        if self.process_set_id is None:
            return None
        ranks = self._current_ranks()
        mine = default_context.topology.rank
        if mine not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(mine)

    def included(self) -> bool | None:
        """Whether this process is in the set; None without ranks. Source: Horovod 0.28.1 ``ProcessSet.included``."""
        if self.ranks is None:
            return None
        return default_context.topology.rank in self._current_ranks()

    def _current_ranks(self) -> list[int]:
        topology = default_context.topology
        if self.process_set_id == 0:
            return list(range(topology.size))
        return self.ranks or []

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _world_ranks(comm: Any) -> list[int]:
    from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return [int(rank) for rank in group.Translate_ranks(list(range(group.Get_size())), world)]


global_process_set = ProcessSet([])
"""All ranks: the default of every operation. Its id is 0; its ranks are known after init."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set. All ranks of the job have to call it, with the same ranks, in the same order; it blocks.

    Unlike in Horovod, HOROVOD_DYNAMIC_PROCESS_SETS=1 is not needed.

    Args:
        process_set: A set that has not been added, or ranks.

    Returns:
        The set, with its id.

    Raises:
        ValueError: There is a set with these ranks, a rank does not exist, or horon is not initialised.

    Source: Horovod 0.28.1 ``add_process_set``.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    size = default_context.topology.size
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"horon: add_process_set({ranks}): expected ranks from 0 to {size - 1}.")
    if tuple(ranks) in default_context.known_process_sets():
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = default_context.engine.add_process_set(ranks)
    default_context.process_sets.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. All ranks of the job have to call it; it blocks.

    Args:
        process_set: Afterwards its id is None.

    Returns:
        False for a set that was not added, and for the global one.

    Raises:
        ValueError: horon is not initialised.

    Source: Horovod 0.28.1 ``remove_process_set``.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set._invalidate()
    if process_set in default_context.process_sets:
        default_context.process_sets.remove(process_set)
    return default_context.engine.remove_process_set(number)
