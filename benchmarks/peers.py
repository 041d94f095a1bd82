"""The peers outside torch.distributed: Open MPI through mpi4py, Horovod, DeepSpeed's shared-memory operation.

Each lives in processes of its own, started by its own launcher (see families.py), on the torch that it was built for
(see build_peers.sh); they are called on tensors that this torch allocated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from contenders import BaseContender, Call, Contender
from operations import Buffers, kRoot


class Mpi(BaseContender):
    """mpi4py's buffer calls on NumPy views of the tensors."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI  # type: ignore[import-not-found]

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self._rank = self._comm.Get_rank()

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective == "send_recv":
            return partial(_ping_pong, self._comm, buffers.input.numpy(), self._rank)
        return self._bound("", collective, buffers)

    def issue(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        return None if collective == "send_recv" else self._bound("I", collective, buffers)

    def _bound(self, prefix: str, collective: str, buffers: Buffers) -> Call:
        source, result, in_place = buffers.input.numpy(), buffers.output.numpy(), self._mpi.IN_PLACE
        is_root, total = self._rank == kRoot, self._mpi.SUM

        def function(name: str) -> Any:
            return getattr(self._comm, prefix + (name if not prefix else name.lower()))

        match collective:
            case "all_reduce":
                return partial(function("Allreduce"), in_place, source, total)
            case "broadcast":
                return partial(function("Bcast"), source, kRoot)
            case "reduce" if is_root:
                return partial(function("Reduce"), in_place, source, total, kRoot)
            case "reduce":
                return partial(function("Reduce"), source, None, total, kRoot)
            case "all_gather":
                return partial(function("Allgather"), source, result)
            case "reduce_scatter":
                return partial(function("Reduce_scatter_block"), source, result, total)
            case "all_to_all":
                return partial(function("Alltoall"), source, result)
            case "gather":
                return partial(function("Gather"), source, result if is_root else None, kRoot)
            case "scatter":
                return partial(function("Scatter"), source if is_root else None, result, kRoot)
            case "barrier":
                return partial(function("Barrier"))
        raise ValueError(f"no such collective: {collective}")

    def wait_all(self, handles: Sequence[Any]) -> None:
        self._mpi.Request.Waitall(list(handles))


def _ping_pong(comm: Any, array: Any, rank: int) -> None:
    if rank % 2 == 0:
        comm.Send(array, rank + 1)
        comm.Recv(array, rank + 1)
    else:
        comm.Recv(array, rank - 1)
        comm.Send(array, rank - 1)


class Horovod(BaseContender):
    """Horovod's functions; names repeat, as those of a model's gradients do, so that its cache of responses serves."""

    name = "horovod"

    def __init__(self) -> None:
        import horovod.torch as hvd  # type: ignore[import-not-found]

        self._hvd = hvd

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        hvd, source = self._hvd, buffers.input
        name = f"{collective}.{source.numel()}.{index}"

        def into_output(function: Any, **options: Any) -> Call:
            def make_output() -> None:
                buffers.output = function(source, name=name, **options)

            return make_output

        match collective:
            case "all_reduce":
                return partial(hvd.allreduce_, source, name=name, op=hvd.Sum)
            case "broadcast":
                return partial(hvd.broadcast_, source, kRoot, name=name)
            case "all_gather":
                return into_output(hvd.allgather)
            case "reduce_scatter":
                return into_output(hvd.reducescatter, op=hvd.Sum)
            case "all_to_all":
                return into_output(hvd.alltoall)
            case "barrier":
                return partial(hvd.barrier)
        return None

    def issue(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective != "all_reduce":
            return None
        name = f"{collective}.{buffers.input.numel()}.{index}"
        return partial(self._hvd.allreduce_async_, buffers.input, name=name, op=self._hvd.Sum)

    def wait_all(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._hvd.synchronize(handle)


class DeepSpeed(BaseContender):
    """The operation that DeepSpeed's CPU inference uses: sum over all ranks of the host, in place."""

    name = "deepspeed"

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective != "all_reduce":
            return None
        return partial(torch.ops.deepspeed.inference_all_reduce_, buffers.input)


class MpiHost:
    """A process under mpirun."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self.rank, self.n_ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self.versions = {"mpi": MPI.Get_library_version().split(",")[0].strip(), "mpi4py": mpi4py.__version__}

    def make(self, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
        return {"mpi": Mpi()}, {}

    def finish(self) -> None:
        """MPI finalizes itself at exit."""


class HorovodHost:
    """A process under horovodrun."""

    def __init__(self) -> None:
        import horovod
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.n_ranks = hvd.rank(), hvd.size()
        self.versions = {"horovod": horovod.__version__, "torch of horovod": torch.__version__}

    def make(self, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
        return {"horovod": Horovod()}, {}

    def finish(self) -> None:
        self._hvd.shutdown()


class DeepSpeedHost:
    """A process of the operation's own; it needs no process group."""

    def __init__(self) -> None:
        import deepspeed  # type: ignore[import-not-found]
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

        self.rank, self.n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ShareMemCommBuilder().load(verbose=False).initialize(self.n_ranks, self.rank)
        self.versions = {"deepspeed": deepspeed.__version__, "torch of deepspeed": torch.__version__}

    def make(self, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
        return {"deepspeed": DeepSpeed()}, {}

    def finish(self) -> None:
        """Its shared memory goes with the processes."""
