"""torch.ops.horon and the bound function beside c10d: the same results, clear errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks, store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def all_reduces(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    ways = (
        lambda tensor, op: torch.ops.horon.all_reduce_(tensor, op, name),
        lambda tensor, op: backend.all_reduce_(tensor, op),
    )
    ops = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}
    for way in ways:
        for shape in [(), (0,), (1,), (7, 3), (5000,), (300_001,)]:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for op, c10d_name in ops.items():
                    tensor = (torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) % 7 + rank).to(dtype)
                    expected = tensor.clone()
                    dist.all_reduce(expected, op=getattr(dist.ReduceOp, c10d_name))
                    way(tensor, op)
                    assert torch.equal(tensor, expected), (shape, dtype, op)
        transposed = torch.full((4, 6), float(rank)).t()
        way(transposed, "sum")
        assert torch.equal(transposed, torch.full((6, 4), float(sum(range(world_size)))))


def errors(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="got 'mean'"):
        torch.ops.horon.all_reduce_(tensor, "mean", name)
    with pytest.raises(RuntimeError):
        torch.ops.horon.all_reduce_(tensor, "sum", "no such group")
    with pytest.raises(dist.DistBackendError, match="number of elements"):
        torch.ops.horon.all_reduce_(torch.ones(3 + rank), "sum", name)
    torch.ops.horon.all_reduce_(tensor, "sum", name)
    assert torch.equal(tensor, torch.full((3,), float(world_size)))


def a_name_that_comes_again(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    tensor = torch.ones(3)
    torch.ops.horon.all_reduce_(tensor, "sum", name)
    kept = dist.group.WORLD  # still alive when its name comes again
    again_store = dist.PrefixStore("again", store())
    dist.destroy_process_group()
    dist.init_process_group("horon", store=again_store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not kept
    again = torch.ones(3)
    torch.ops.horon.all_reduce_(again, "sum", dist.group.WORLD.group_name)
    assert torch.equal(again, tensor)


def compiled(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        torch.ops.horon.all_reduce_(y, "sum", name)
        return torch.relu(y)

    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    compiled_layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_layer(x, weight), layer(x, weight))


class SeesDispatch(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    """Keeps the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def whoever_wants_to_see_a_call_sees_it(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    summed = float(world_size)
    for mode in (SeesDispatch(), SeesFunctions()):
        tensor = torch.ones(3)
        with mode:
            torch.ops.horon.all_reduce_(tensor, "sum", name)
        assert any("all_reduce_" in one for one in mode.seen), mode.seen
        assert tensor.tolist() == [summed] * 3
    with torch.profiler.profile() as profile:
        torch.ops.horon.all_reduce_(torch.ones(3), "sum", name)
    assert any(event.name == "horon::all_reduce_" for event in profile.events())
    with FakeTensorMode():
        fake = torch.ones(3)
        torch.ops.horon.all_reduce_(fake, "sum", name)  # moves nothing
    for tensor in (torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))):
        torch.ops.horon.all_reduce_(tensor, "sum", name)
        assert tensor.tolist() == [summed] * 3
    with torch.inference_mode():
        tensor = torch.ones(3)
        torch.ops.horon.all_reduce_(tensor, "sum", name)
        assert tensor.tolist() == [summed] * 3


def unusual_arguments(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    tensor = torch.ones(3)
    torch.ops.horon.all_reduce_(tensor, op="sum", group_name=name)
    torch.ops.horon.all_reduce_(tensor=tensor, op="sum", group_name=name)
    torch.ops.horon.all_reduce_.default(tensor, "sum", name)
    assert tensor.tolist() == [float(world_size**3)] * 3
    for wrong in ((), (tensor,), (tensor, "sum", name, 1), (tensor, 1, name), (3, "sum", name), (None, "sum", name)):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            torch.ops.horon.all_reduce_(*wrong)
    with pytest.raises((RuntimeError, UnicodeEncodeError)):
        torch.ops.horon.all_reduce_(tensor, "sum", "\ud800")
    with pytest.raises((NotImplementedError, ValueError)):
        torch.ops.horon.all_reduce_(torch.ones(3).to_sparse(), "sum", name)


@pytest.mark.parametrize("body", [whoever_wants_to_see_a_call_sees_it, unusual_arguments])
def test_calls_that_go_through_the_dispatcher(body: Callable[[int, int], None]) -> None:
    run_ranks(body, 2)


@pytest.mark.parametrize("body", [all_reduces, errors, compiled, a_name_that_comes_again])
def test_operators(body: Callable[[int, int], None]) -> None:
    run_ranks(body, 2)
