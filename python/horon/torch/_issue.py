"""From an API call to the engine: what all collectives check, and what they leave for synchronize()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horon.common import _reduce_ops
from horon.common._context import Pending, default_context
from horon.common.process_sets import ProcessSet
from horon.common.util import get_average_backwards_compatibility_fun

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_reduce_ops)


def id_of(process_set: ProcessSet) -> int:
    """The engine's number of a process set. Raises ValueError for one that was not added."""
    number = process_set.process_set_id
    if number is None:
        default_context.topology  # noqa: B018  (before init, that is what is wrong)
        raise ValueError(f"horon: {process_set} was not added: pass it to hvd.init() or hvd.add_process_set().")
    return number


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless the engine can take the tensors' memory as it is."""
    if not tensors:
        raise ValueError("horon: a grouped operation needs at least one tensor.")
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")


def issue_as(kind: str, name: str | None, process_set: int, issue: Callable[[str], int]) -> int:
    """Calls `issue` with the name of the operation, its own or one that is made up, and returns the handle.

    A made up name that `issue` refused, by an exception, is that of the next operation: ranks count alike, also after
    an error that is one rank's own.
    """
    if name is not None:
        return issue(f"{kind}.{name}")
    numbers = default_context.numbers(kind, process_set)
    number = numbers.take()
    try:
        return issue(numbers.name_of(number))
    except Exception:
        numbers.give_back(number)
        raise


def group_names(base: str, count: int) -> list[str]:
    """Names of the members of a group, as Horovod makes them: "grouped_allreduce.weights_1of2", ..."""
    return [f"{base}_{number}of{count}" for number in range(1, count + 1)]


def expect(handle: int, result: Callable[[list[torch.Tensor]], Any], keeps: Any) -> int:
    """Remembers what synchronize(handle) shall return."""
    default_context.pending[handle] = Pending(result, keeps)
    return handle


def needs_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd has to know about the call."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def first(outputs: list[torch.Tensor]) -> torch.Tensor:
    """The result of an operation on one tensor."""
    return outputs[0]
