"""Tensors of one call that share memory: every input is read before any output changes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import Cases, gloo_lacks, run_ranks
from horovod_session import horovod

# A header's inline bytes, one step of shared memory, many steps.
COUNTS = [4, 1000, 100_000, 1_500_000]


def _part(number: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 97 + 1000 * number


def _sum(count: int, world_size: int) -> torch.Tensor:
    return torch.stack([_part(rank, count) for rank in range(world_size)]).sum(0)


def _message(source: int, target: int, count: int) -> torch.Tensor:
    return _part(10 * source + target, count)


def _quiet_all_reduce_coalesced(tensors: list[torch.Tensor], async_op: bool = False) -> dist.Work | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still what many call
        return dist.all_reduce_coalesced(tensors, async_op=async_op)


def _reductions(rank: int, world_size: int) -> None:
    cases = Cases()
    for count in COUNTS:
        expected = _sum(count, world_size)
        with cases(f"all_reduce_coalesced, the same tensor twice, n={count}"):
            tensor = _part(rank, count)
            _quiet_all_reduce_coalesced([tensor, tensor])
            assert torch.equal(tensor, expected)
        with cases(f"all_reduce_coalesced, overlapping, n={count}"):
            tensor = torch.cat([_part(rank, count)] * 2)
            _quiet_all_reduce_coalesced([tensor[: count + count // 2], tensor[count // 4 : -1], tensor[count // 2 :]])
            assert torch.equal(tensor, torch.cat([expected] * 2))
        with cases(f"all_reduce_coalesced, every other element as well, n={count}"):
            tensor = _part(rank, count)
            _quiet_all_reduce_coalesced([tensor[::2], tensor])
            assert torch.equal(tensor, expected)
        received = torch.stack([_message(source, rank, count) for source in range(world_size)]).sum(0)
        for slot in range(world_size):
            with cases(f"reduce_scatter_tensor into part {slot}, n={count}"):
                whole = torch.cat([_message(rank, target, count) for target in range(world_size)])
                dist.reduce_scatter_tensor(whole[slot * count : (slot + 1) * count], whole)
                assert torch.equal(whole[slot * count : (slot + 1) * count], received)
        with cases(f"reduce_scatter_tensor across two parts, n={count}"):
            whole = torch.cat([_message(rank, target, count) for target in range(world_size)])
            at = count // 2 if world_size > 1 else 0
            dist.reduce_scatter_tensor(whole[at : at + count], whole)
            assert torch.equal(whole[at : at + count], received)
    cases.check()


def _movement(rank: int, world_size: int) -> None:
    cases = Cases()
    for count in COUNTS:
        everyones = [_part(source, count) for source in range(world_size)]
        received = [_message(source, rank, count) for source in range(world_size)]
        for slot in range(world_size):
            with cases(f"all_gather of output {slot}, n={count}"):
                outputs = [torch.zeros(count) for _ in range(world_size)]
                outputs[slot].copy_(everyones[rank])
                dist.all_gather(outputs, outputs[slot])
                assert all(map(torch.equal, outputs, everyones))
            with cases(f"all_gather_into_tensor of part {slot}, n={count}"):
                whole = torch.zeros(world_size * count)
                whole[slot * count : (slot + 1) * count] = everyones[rank]
                dist.all_gather_into_tensor(whole, whole[slot * count : (slot + 1) * count])
                assert torch.equal(whole, torch.cat(everyones))
            with cases(f"gather of output {slot}, n={count}"):
                outputs = [torch.zeros(count) for _ in range(world_size)]
                outputs[slot].copy_(everyones[rank])
                dist.gather(outputs[slot], outputs if rank == 0 else None)
                assert rank != 0 or all(map(torch.equal, outputs, everyones))
        with cases(f"all_gather_into_tensor of a part across two, n={count}"):
            whole = torch.zeros(world_size * count)
            at = count // 2 if world_size > 1 else 0
            whole[at : at + count] = everyones[rank]
            dist.all_gather_into_tensor(whole, whole[at : at + count])
            assert torch.equal(whole, torch.cat(everyones))
        for name, order in (("in place", 1), ("in place, reversed", -1)):
            with cases(f"all_to_all {name}, n={count}"):
                inputs = [_message(rank, target, count) for target in range(world_size)]
                outputs = inputs[::order]
                dist.all_to_all(outputs, inputs)
                assert all(map(torch.equal, outputs, received))
    cases.check()


def _where_gloo_is_wrong(rank: int, world_size: int) -> None:
    cases = Cases()
    for count in COUNTS:
        with cases(f"all_reduce_coalesced, async, n={count}"):
            tensor = _part(rank, count)
            first = dist.all_reduce(tensor, async_op=True)
            second = _quiet_all_reduce_coalesced([tensor, tensor], async_op=True)
            first.wait()
            second.wait()
            assert torch.equal(tensor, _sum(count, world_size) * world_size)
        for slot in range(world_size):
            with cases(f"reduce_scatter into input {slot}, n={count}"):
                expected = torch.stack([_message(source, rank, count) for source in range(world_size)]).sum(0)
                inputs = [_message(rank, target, count) for target in range(world_size)]
                dist.reduce_scatter(inputs[slot], inputs)
                assert torch.equal(inputs[slot], expected)
            with cases(f"scatter into input {slot}, n={count}"):
                inputs = [_part(target, count) for target in range(world_size)]
                dist.scatter(inputs[slot], inputs if rank == 0 else None)
                assert torch.equal(inputs[slot], _part(rank, count))
        with cases(f"all_to_all_single in place, n={count}"):
            whole = torch.cat([_message(rank, target, count) for target in range(world_size)])
            dist.all_to_all_single(whole, whole)
            assert torch.equal(whole, torch.cat([_message(source, rank, count) for source in range(world_size)]))
        with cases(f"all_to_all_single in place, unequal parts, n={count}"):
            sent = [count * ((rank + target) % 3) for target in range(world_size)]
            coming = [count * ((source + rank) % 3) for source in range(world_size)]
            memory = torch.zeros(3 * world_size * count)
            message = [_message(rank, target, length) for target, length in enumerate(sent)]
            memory[: sum(sent)] = torch.cat(message)
            shift = count // 2
            output = memory[shift : shift + sum(coming)]
            dist.all_to_all_single(output, memory[: sum(sent)], coming, sent)
            lengths = enumerate(coming)
            assert torch.equal(output, torch.cat([_message(source, rank, length) for source, length in lengths]))
    cases.check()


def _coalesced(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    cases = Cases()
    for count in COUNTS:
        everyones = torch.cat([_part(source, count) for source in range(world_size)])
        received = torch.stack([_message(source, rank, count) for source in range(world_size)]).sum(0)
        with cases(f"all_gather coalesced, an output over another input, n={count}"):
            first, second = torch.zeros(world_size * count), torch.zeros(world_size * count)
            first[:count] = _part(rank, count)
            second[:count] = _part(rank, count) + 1
            with dist._coalescing_manager(group, async_ops=False):
                dist.all_gather_into_tensor(first, second[:count])
                dist.all_gather_into_tensor(second, first[:count])
            assert torch.equal(first, everyones + 1)
            assert torch.equal(second, everyones)
        with cases(f"reduce_scatter coalesced, an output over another input, n={count}"):
            both = [torch.cat([_message(rank, t, count) + i for t in range(world_size)]) for i in range(2)]
            outputs = [both[1][:count], both[0][:count]]
            with dist._coalescing_manager(group, async_ops=False):
                dist.reduce_scatter_tensor(outputs[0], both[0])
                dist.reduce_scatter_tensor(outputs[1], both[1])
            assert torch.equal(outputs[0], received)
            assert torch.equal(outputs[1], received + world_size)
    cases.check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("work", [_reductions, _movement])
def test_every_input_is_read_before_any_output_changes(work: object, world_size: int) -> None:
    run_ranks(work, world_size, timeout=120)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_input_is_read_first_where_gloo_is_wrong(world_size: int) -> None:
    gloo_lacks("wrong results, with no error")
    run_ranks(_where_gloo_is_wrong, world_size, timeout=120)


@pytest.mark.parametrize("world_size", [2, 3])
def test_coalesced_calls_read_all_inputs_first(world_size: int) -> None:
    gloo_lacks("coalesced calls")
    run_ranks(_coalesced, world_size)


def _grouped(rank: int, size: int) -> None:
    with horovod() as hvd:
        cases = Cases()
        for count in COUNTS:
            expected = torch.cat([_sum(count, size)] * 2)
            with cases(f"grouped_allreduce_, the same tensor twice, n={count}"):
                memory = torch.cat([_part(rank, count)] * 2)
                hvd.grouped_allreduce_([memory, memory], op=hvd.Sum)
                assert torch.equal(memory, expected)
            with cases(f"grouped_allreduce_, overlapping, n={count}"):
                memory = torch.cat([_part(rank, count)] * 2)
                hvd.grouped_allreduce_([memory[: count + count // 2], memory[count // 4 :]], op=hvd.Sum)
                assert torch.equal(memory, expected)
        cases.check()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_of_named_operations(size: int) -> None:
    gloo_lacks("named operations")
    run_ranks(_grouped, size)
