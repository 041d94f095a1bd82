"""What lives in the processes with horon's torch: c10d backends, horon's own calls, and plain copies for scale."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import noop
import torch
import torch.distributed as dist
from operations import Buffers, calls_per_sample, kRoot, receives

Call = Callable[[], Any]


class Unavailable(Exception):
    """This contender cannot run here; the message says why."""


class Contender(Protocol):
    """One way to be timed. Every rank makes the same calls, in the same order."""

    name: str
    is_checked: bool  # whether it really communicates, so that results can be compared
    pool: str  # contenders with the same pool are timed on the same tensors

    def empty(self, elements: int) -> torch.Tensor:
        """Allocates a tensor of the kind that it is timed on."""

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        """Returns one synchronous call, or None if it lacks the collective. `index` counts the buffers of the pool."""

    def issue(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        """Returns a call that starts the operation and returns its handle."""

    def wait_all(self, handles: Sequence[Any]) -> None:
        """Waits for what calls of `issue` returned."""


class BaseContender:
    """Lacks everything; allocates ordinary tensors."""

    name = ""
    is_checked = True
    pool = "ordinary"

    def empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements)

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        return None

    def issue(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        return None

    def wait_all(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.wait()


def new_group(backend: str) -> dist.ProcessGroup:
    """Makes a group of all ranks. "fake" is PyTorch's backend that does nothing, "noop..." ours (see noop.py)."""
    if backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it
    if backend in noop.kNames:
        noop.register()
        backend = backend.replace("-", "")
    group: dist.ProcessGroup = dist.new_group(backend=backend)  # type: ignore[assignment]  # of all ranks, so no -100
    return group


class C10d(BaseContender):
    """PyTorch's own functions on a group of one backend."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self.is_checked = name not in noop.kMovesNothing
        self._group = group
        self._rank = dist.get_rank(group)

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective == "send_recv":
            return partial(_ping_pong, dist.send, dist.recv, buffers.input, self._rank, self._group)
        return self._bound(collective, buffers)

    def issue(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        return None if collective == "send_recv" else partial(self._bound(collective, buffers), async_op=True)

    def _bound(self, collective: str, buffers: Buffers) -> Callable[..., Any]:
        group, source, result, is_root = self._group, buffers.input, buffers.output, self._rank == kRoot
        match collective:
            case "all_reduce":
                return partial(dist.all_reduce, source, group=group)
            case "broadcast":
                return partial(dist.broadcast, source, kRoot, group=group)
            case "reduce":
                return partial(dist.reduce, source, kRoot, group=group)
            case "all_gather":
                return partial(dist.all_gather_into_tensor, result, source, group=group)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, result, source, group=group)
            case "all_to_all":
                return partial(dist.all_to_all_single, result, source, group=group)
            case "gather":
                return partial(dist.gather, source, buffers.parts if is_root else None, kRoot, group=group)
            case "scatter":
                return partial(dist.scatter, result, buffers.parts if is_root else None, kRoot, group=group)
            case "barrier":
                return partial(dist.barrier, group=group)
        raise ValueError(f"no such collective: {collective}")


def _ping_pong(send: Any, recv: Any, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Neighbours 0 and 1, 2 and 3, ... send the tensor there and back."""
    if rank % 2 == 0:
        send(tensor, rank + 1, group)
        recv(tensor, rank + 1, group)
    else:
        recv(tensor, rank - 1, group)
        send(tensor, rank - 1, group)


class HoronArena(C10d):
    """horon on tensors that live in its shared mapping."""

    pool = "arena"

    def __init__(self, group: dist.ProcessGroup) -> None:
        import horon

        if not hasattr(horon, "empty"):
            raise Unavailable("this horon has no horon.empty")
        super().__init__("horon-arena", group)
        self._empty = horon.empty

    def empty(self, elements: int) -> torch.Tensor:
        tensor: torch.Tensor = self._empty(elements, dtype=torch.float32)
        return tensor


class HoronOp(BaseContender):
    """`torch.ops.horon.all_reduce_`, beside c10d."""

    name = "horon-op"

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            self._all_reduce = torch.ops.horon.all_reduce_
        except AttributeError:
            raise Unavailable("this horon has no torch.ops.horon.all_reduce_") from None
        self._group_name = group.group_name

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective != "all_reduce":
            return None
        return partial(self._all_reduce, buffers.input, "sum", self._group_name)


class Memcpy(BaseContender):
    """Ranks copy memory at the same time, for scale.

    "memcpy" copies as many bytes as the collective gives to a rank, its own part included, and only on ranks that get
    any; "memcpy-all" copies the larger of input and output on every rank.
    """

    is_checked = False

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective == "barrier":
            return None
        if self.name == "memcpy-all":
            source = max(buffers.input, buffers.output, key=torch.Tensor.numel)
        elif receives(collective, buffers, dist.get_rank()):
            source = buffers.output
        else:
            return receives_nothing
        return partial(_copy, torch.zeros_like(source), source, calls_per_sample(collective))


class OnePass(BaseContender):
    """All ranks read and rewrite the larger of input and output once, in place, at the same time.

    As much memory has to move for a reduction in place, and for a copy from one tensor into another of that size.
    """

    name = "pass"
    is_checked = False

    def call(self, collective: str, buffers: Buffers, index: int) -> Call | None:
        if collective == "barrier":
            return None
        return partial(max(buffers.input, buffers.output, key=torch.Tensor.numel).mul_, 1.0)


def receives_nothing() -> None:
    """Stands for a rank that takes no part; its samples are left out."""


def _copy(destination: torch.Tensor, source: torch.Tensor, times: int) -> None:
    for _ in range(times):
        destination.copy_(source)


def make_contenders(names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Makes them on every rank of the default group; blocks until all ranks do.

    Returns:
        The contenders, and why others are skipped, both by name.
    """
    groups: dict[str, dist.ProcessGroup] = {}

    def group(backend: str) -> dist.ProcessGroup:
        if backend not in groups:
            groups[backend] = new_group(backend)
        return groups[backend]

    made: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            if name in ("memcpy", "memcpy-all"):
                made[name] = Memcpy(name)
            elif name == "pass":
                made[name] = OnePass()
            elif name == "horon-arena":
                made[name] = HoronArena(group("horon"))
            elif name == "horon-op":
                made[name] = HoronOp(group("horon"))
            elif name in noop.kNames and not noop.is_built():
                raise Unavailable("its C++ part did not compile")
            elif name.startswith("horon") and importlib.util.find_spec("horon") is None:
                raise Unavailable("horon is not installed")
            else:
                made[name] = C10d(name, group(name))
        except Unavailable as error:
            skipped[name] = str(error)
    return made, skipped


class TorchHost:
    """A process with a default group on Gloo, in which the contenders' groups live side by side."""

    def __init__(self) -> None:
        self.rank, self.n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['HORON_BENCH_STORE']}",
            rank=self.rank,
            world_size=self.n_ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        self.versions = {"torch": str(torch.__version__)}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            self.versions["horon"] = importlib.metadata.version("horon")

    def make(self, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
        return make_contenders(names)

    def finish(self) -> None:
        dist.destroy_process_group()
