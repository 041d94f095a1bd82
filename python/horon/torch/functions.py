"""Parameters and objects from one rank to all, or from all to all. Source: Horovod 0.28.1 ``torch.functions``."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horon.common._context import default_context
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._allgather import allgather
from horon.torch._broadcast import broadcast_, broadcast_async_
from horon.torch._completion import synchronize
from horon.torch._issue import id_of
from horon.torch._optimizer_state import broadcast_optimizer_state

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Sends parameters from one rank to all, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of either.
            Entries of a state_dict that are no tensors are sent pickled and put into the dict.
        root_rank: A global rank.

    Raises:
        ValueError: None of these.

    Source: Horovod 0.28.1 ``broadcast_parameters`` (which takes no generators).
    """
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
        for name, value in named:
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"invalid params: expected tensors, got {type(value)} for {name!r}")
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    in_flight = []
    for name, value in named:
        if isinstance(value, torch.Tensor):
            # A layout like channels_last goes as a copy.
            sent = value.detach() if value.is_contiguous() else value.detach().contiguous()
            in_flight.append((value, sent, broadcast_async_(sent, root_rank, name)))
    for value, sent, handle in in_flight:
        synchronize(handle)
        if not value.is_contiguous():
            with torch.no_grad():
                value.copy_(sent)
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            received = broadcast_object(value, root_rank, name)
            if isinstance(params, dict):
                params[name] = received


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends a Python object, pickled with cloudpickle, from one rank to all, and blocks.

    Args:
        obj: Only the root's counts; others may pass None.
        root_rank: A global rank.
        name: As :func:`allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        On the root `obj` itself, elsewhere a copy.

    Raises:
        RuntimeError: The root could not pickle its object; on the root itself, what it got from pickling. The next
            operation works.

    Source: Horovod 0.28.1 ``broadcast_object`` (where, without a name, all ranks must pass the same type).
    """
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    base = default_context.new_name("object", id_of(process_set)) if name is None else name
    is_root = default_context.topology.rank == root_rank
    mine = _Pickled.of(obj) if is_root else _Pickled(bytearray())
    n_bytes = torch.tensor([mine.size], dtype=torch.int64)
    broadcast_(n_bytes, root_rank, f"{base}.sz", process_set)
    size = int(n_bytes)
    data = mine.data if is_root else bytearray(abs(size))
    broadcast_(torch.frombuffer(data, dtype=torch.uint8), root_rank, f"{base}.t", process_set)
    mine.raise_own()
    if size < 0:
        raise RuntimeError(f"horon: rank {root_rank} could not pickle the object that it was to send: {data.decode()}")
    return obj if is_root else cloudpickle.loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gathers a Python object of every rank, pickled with cloudpickle, and blocks.

    Args:
        obj: Any type, also different ones.
        name: As :func:`allreduce_async`.

    Returns:
        Copies of the ranks' objects, in rank order.

    Raises:
        RuntimeError: A rank could not pickle its object; on that rank itself, what it got from pickling. The next
            operation works.

    Source: Horovod 0.28.1 ``allgather_object`` (where, without a name, all ranks must pass the same type).
    """
    import cloudpickle

    base = default_context.new_name("object", 0) if name is None else name
    mine = _Pickled.of(obj)
    sizes = allgather(torch.tensor([mine.size], dtype=torch.int64), name=f"{base}.sz").tolist()
    gathered = allgather(torch.frombuffer(mine.data, dtype=torch.uint8), name=f"{base}.t")
    parts = []
    for part in torch.split(gathered, [abs(size) for size in sizes]):
        data = bytearray(part.numel())
        torch.frombuffer(data, dtype=torch.uint8).copy_(part)
        parts.append(data)
    mine.raise_own()
    failures = [f"rank {rank}: {parts[rank].decode()}" for rank, size in enumerate(sizes) if size < 0]
    if failures:
        raise RuntimeError(
            "horon: not all ranks could pickle the object that they were to send. " + "; ".join(failures)
        )
    return [cloudpickle.loads(data) for data in parts]


@dataclass(frozen=True)
class _Pickled:
    """What a rank sends for an object: its pickle, or why there is none, so that nobody waits for it."""

    data: bytearray
    """Never empty on a rank that sends."""
    error: Exception | None = None

    @classmethod
    def of(cls, obj: Any) -> _Pickled:
        import cloudpickle

        try:
            return cls(bytearray(cloudpickle.dumps(obj)))
        except Exception as error:
            why = "".join(traceback.format_exception_only(type(error), error)).strip()
            return cls(bytearray(why.encode(errors="replace")), error)

    @property
    def size(self) -> int:
        """In bytes; negative for the text of an error."""
        return len(self.data) if self.error is None else -len(self.data)

    def raise_own(self) -> None:
        """Raises what this rank got from pickling, if it could not."""
        if self.error is not None:
            raise self.error
