"""Start, end, and questions about this process. Source: Horovod 0.28.1 ``common.basics.HorovodBasics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # noqa: F401  (the extension needs its libraries)

from horon import _C, _build_info
from horon.common._context import default_context
from horon.common.process_sets import ProcessSet, global_process_set


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts horon. All ranks have to call it; it returns when all have come. A no-op when it has been called before.

    Rank and size come from the variables of Horovod (HOROVOD_RANK, HOROVOD_SIZE, ...), torchrun, Open MPI, a PMI
    launcher or srun; without any, this process is alone. If there is no default torch.distributed group, it makes one
    of backend "horon"; if there is one, it uses that group's ranks and store, whatever its backend.

    Args:
        comm: Ranks of the job that take part (default: all), in the order of their new ranks, or an mpi4py
            communicator.
        process_sets: Sets to add, the same on all ranks; but where one is made of an mpi4py communicator, each rank may
            give its part of a split one. Or "dynamic", which horon does not need.

    Raises:
        ValueError: A duplicate process set, a rank outside of `comm`, nothing says where to meet, or HORON_TIMELINE is
            a file that rank 0 can not write.
        RuntimeError: In a process forked from a rank that has called it, if there are others.

    Source: Horovod 0.28.1 ``init``.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'horon: hvd.init(process_sets={process_sets!r}): expected a list of sets or "dynamic".')
        process_sets = None
    sets = list(process_sets or [])
    try:
        of_communicators = [i for i, process_set in enumerate(sets) if process_set.mpi_comm is not None]
        ids = default_context.init(comm, [process_set.ranks or [] for process_set in sets], of_communicators)
    except ValueError as error:
        if error.args[:1] != ("duplicate process set",):
            raise
        index = error.args[1]
        raise ValueError(
            f"Horovod could not be initialized because process_sets entry number {index} is a duplicate: {sets[index]}"
        ) from None
    global_process_set.ranks = list(range(default_context.topology.size))
    for process_set, number in zip(sets, ids, strict=True):
        process_set.process_set_id = number
        if process_set not in default_context.process_sets:
            default_context.process_sets.append(process_set)


def shutdown() -> None:
    """Ends horon: what init made, and nothing else. It runs at exit by itself. init can be called again afterwards.

    Operations in flight fail on the other ranks with HorovodInternalError. Source: Horovod 0.28.1 ``shutdown``.
    """
    default_context.shutdown()


def is_initialized() -> bool:
    """Whether init was called, and shutdown not since; also True in processes forked meanwhile, where rank() and
    size() work, but no collectives.

    Source: Horovod 0.28.1 ``is_initialized``.
    """
    return default_context.is_initialized


def rank() -> int:
    """This process's number, from 0 to size() - 1. Raises ValueError before init. Source: Horovod 0.28.1 ``rank``."""
    return default_context.topology.rank


def size() -> int:
    """The number of processes. Raises ValueError before init. Source: Horovod 0.28.1 ``size``."""
    return default_context.topology.size


def local_rank() -> int:
    """This process's number on its node. Raises ValueError before init. Source: Horovod 0.28.1 ``local_rank``."""
    return default_context.topology.local_rank


def local_size() -> int:
    """The number of processes on its node. Raises ValueError before init. Source: Horovod 0.28.1 ``local_size``."""
    return default_context.topology.local_size


def cross_rank() -> int:
    """The number of this node among those that have a process with this local rank.

    Raises:
        ValueError: Before init.

    Source: Horovod 0.28.1 ``cross_rank``.
    """
    return default_context.topology.cross_rank


def cross_size() -> int:
    """How many nodes have a process with this local rank. Raises ValueError before init.

    Source: Horovod 0.28.1 ``cross_size``.
    """
    return default_context.topology.cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have equally many processes. Raises ValueError before init.

    Source: Horovod 0.28.1 ``is_homogeneous``.
    """
    return default_context.topology.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record a timeline for chrome://tracing or Perfetto.

    Args:
        file_path: Holds every event as soon as it has happened; stop_timeline() closes the list of them.
        mark_cycles: Also mark each round of the engine.

    Raises:
        ValueError: Before init.

    Source: Horovod 0.28.1 ``start_timeline``.
    """
    default_context.engine.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stops recording and ends the file. Raises ValueError before init. Source: Horovod 0.28.1 ``stop_timeline``."""
    default_context.engine.stop_timeline()


def mpi_threads_supported() -> bool:
    """Raises ValueError: horon does not use MPI. Source: Horovod 0.28.1 ``mpi_threads_supported``."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_enabled() -> bool:
    """False: horon runs under mpirun, but does not use MPI. Source: Horovod 0.28.1 ``mpi_enabled``."""
    return False


def mpi_built() -> bool:
    """False. Source: Horovod 0.28.1 ``mpi_built``."""
    return False


def gloo_enabled() -> bool:
    """True: PyTorch's Gloo carries what goes between hosts. Source: Horovod 0.28.1 ``gloo_enabled``."""
    return True


def gloo_built() -> bool:
    """True. Source: Horovod 0.28.1 ``gloo_built``."""
    return True


def nccl_built() -> int:
    """NCCL's version code (23007: 2.30.7) if this build has its GPU parts, else 0.

    Source: Horovod 0.28.1 ``nccl_built``.
    """
    return _C.nccl_version() if _build_info.CUDA else 0


def ddl_built() -> bool:
    """False. Source: Horovod 0.28.1 ``ddl_built``."""
    return False


def ccl_built() -> bool:
    """False. Source: Horovod 0.28.1 ``ccl_built``."""
    return False


def cuda_built() -> bool:
    """Whether this build has its GPU parts, so that CUDA tensors work. Source: Horovod 0.28.1 ``cuda_built``."""
    return _build_info.CUDA


def rocm_built() -> bool:
    """False. Source: Horovod 0.28.1 ``rocm_built``."""
    return False
