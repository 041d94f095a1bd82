"""An optimizer's state from one rank to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horon.common._context import default_context
from horon.torch._broadcast import broadcast_async_
from horon.torch._completion import synchronize


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class _Description:
    """An optimizer without its tensors: options of each group, state by the parameter's number, and other state."""

    group_sizes: list[int]
    options: list[dict[str, Any]]
    state: dict[int, dict[str, Any]]
    other_state: dict[Any, Any]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes every rank's optimizer equal to one rank's: options of the parameter groups, and state.

    No rank takes a step for it, so parameters stay as they are, and what the root has not, others lose. Where the
    state was empty, parameters get a ``.grad`` of zeros if they have none, as scripts for Horovod expect; but not those
    with sparse gradients, which a dense one would make dense.

    Args:
        optimizer: Any but LBFGS, wrapped in a DistributedOptimizer or not. Parameters in the same order on all ranks.
        root_rank: A global rank.
        model: Says which parameters have sparse gradients: those of its Embedding and EmbeddingBag with
            ``sparse=True``. Those of SparseAdam are known without it.

    Raises:
        ValueError: LBFGS; or the numbers of parameters differ from the root's.

    Source: Horovod 0.28.1 ``broadcast_optimizer_state``.
    """
    from horon.torch.functions import broadcast_object

    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    was_empty = not optimizer.state
    is_root = default_context.topology.rank == root_rank
    described = broadcast_object(_describe(optimizer, parameters) if is_root else None, root_rank)
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if group_sizes != described.group_sizes:
        raise ValueError(
            f"broadcast_optimizer_state: this rank's parameter groups have {group_sizes} parameters, "
            f"but rank {root_rank}'s have {described.group_sizes}."
        )
    if not is_root:
        _take(optimizer, parameters, described)
    _broadcast_tensors(optimizer, parameters, described, root_rank)
    if was_empty and not isinstance(optimizer, torch.optim.SparseAdam):
        sparse = _sparse_parameters(model)
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None and parameter not in sparse:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _sparse_parameters(model: torch.nn.Module | None) -> set[torch.Tensor]:
    modules = model.modules() if model is not None else ()
    return {
        module.weight
        for module in modules
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }


def _describe(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Description:
    number_of = {parameter: number for number, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    other_state: dict[Any, Any] = {}
    per_key: Mapping[Any, Any] = optimizer.state  # by parameter, as a rule
    for key, values in per_key.items():
        if key in number_of:
            state[number_of[key]] = {name: _without_data(value) for name, value in values.items()}
        elif not isinstance(key, torch.Tensor):
            other_state[key] = values
    return _Description(
        [len(group["params"]) for group in optimizer.param_groups],
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        state,
        other_state,
    )


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return _TensorSpec(tuple(value.shape), value.dtype, value.device.type)
    return value


def _take(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], described: _Description) -> None:
    """Takes over what is not a tensor, and makes room for what is."""
    for group, options in zip(optimizer.param_groups, described.options, strict=True):
        group.update(options)
    old = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(described.other_state)
    for number, values in described.state.items():
        before = old.get(parameters[number], {})
        optimizer.state[parameters[number]] = {
            name: _room_for(value, before.get(name), parameters[number]) if isinstance(value, _TensorSpec) else value
            for name, value in values.items()
        }


def _room_for(spec: _TensorSpec, old: Any, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor for the root's values: the old one, or a new one on the parameter's own GPU if it belongs on one."""
    if (
        isinstance(old, torch.Tensor)
        and (tuple(old.shape), old.dtype, old.device.type) == (spec.shape, spec.dtype, spec.device)
        and old.is_contiguous()
    ):
        return old
    device = parameter.device if parameter.device.type == spec.device else torch.device(spec.device)
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _broadcast_tensors(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], described: _Description, root_rank: int
) -> None:
    in_flight = []
    for number, values in described.state.items():
        for name, value in values.items():
            if isinstance(value, _TensorSpec):
                tensor = optimizer.state[parameters[number]][name]
                sent = tensor.detach().contiguous()
                in_flight.append(broadcast_async_(sent, root_rank, f"optimizer_state.{number}.{name}"))
    for handle in in_flight:
        synchronize(handle)
