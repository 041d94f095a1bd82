"""Settings of a group: from the environment, for one group, and wrong ones (docs/options.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, run_ranks

VALUES: dict[str, Any] = {
    "inline_bytes": 128,
    "deposit_bytes": 8192,
    "buffer_bytes": 64 * 1024,
    "ring_bytes": 128 * 1024,
    "eager_bytes": 64,
    "claiming": "on",
    "cuda_batch_bytes": 4096,
    "sparse": True,
    "hierarchical": False,
    "carrier": "gloo",
    "host_id": "here",
}
DEFAULTS: dict[str, Any] = {
    "inline_bytes": 8192,
    "deposit_bytes": 256 * 1024,
    "buffer_bytes": 2 * 1024 * 1024,
    "ring_bytes": 0,
    "eager_bytes": 16384,
    "claiming": "auto",
    "cuda_batch_bytes": 0,
    "sparse": False,
    "hierarchical": True,
    "carrier": "tcp",
    "host_id": "",
}


def _options_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu")).options


def _everything_works(group: dist.ProcessGroup, rank: int, size: int) -> None:
    for count in (1, 100, 5000, 100_000):
        tensor = torch.arange(count, dtype=torch.float32) + rank
        dist.all_reduce(tensor, group=group)
        expected = torch.arange(count, dtype=torch.float32) * size + sum(range(size))
        assert torch.equal(tensor, expected), count
        if rank == 0:
            dist.send(tensor, group=group, group_dst=1)
        elif rank == 1:
            received = torch.zeros(count)
            dist.recv(received, group=group, group_src=0)
            assert torch.equal(received, expected), count


def _values(rank: int, size: int) -> None:
    import horon

    cases = Cases()
    with cases("defaults"):
        options = horon.Options()
        assert {name: getattr(options, name) for name in DEFAULTS} == DEFAULTS
    for name, value in VALUES.items():
        with cases(name):
            options = horon.Options()
            setattr(options, name, value)
            group = dist.new_group(pg_options=options)
            assert getattr(_options_of(group), name) == value
            assert getattr(copy.deepcopy(options), name) == value
            setattr(options, name, DEFAULTS[name])  # changes nothing in the group
            assert getattr(_options_of(group), name) == value
            _everything_works(group, rank, size)
            dist.destroy_process_group(group)
    with cases("all at once"):
        options = horon.Options()
        for name, value in VALUES.items():
            setattr(options, name, value)
        group = dist.new_group(pg_options=options)
        _everything_works(group, rank, size)
    cases.check()


def test_values_of_one_group() -> None:
    gloo_lacks("other options")
    run_ranks(_values, 3)


def _from_environment(rank: int, size: int) -> None:
    import horon

    options = _options_of(dist.group.WORLD)  # type: ignore[arg-type]
    assert (options.ring_bytes, options.claiming, options.host_id) == (32768, "off", "a name")
    assert horon.Options().ring_bytes == 32768
    _everything_works(dist.group.WORLD, rank, size)  # type: ignore[arg-type]


def test_values_from_the_environment() -> None:
    gloo_lacks("other options")
    env = {
        "HORON_RING_BYTES": "32768",
        "HORON_CLAIMING": "off",
        "HORON_HOST_ID": "a name",
        "HORON_MOVE_THREADS": "off",
        "HORON_LINGER_US": "0",
    }
    run_ranks(_from_environment, 2, env=env)


def _wrong(rank: int, size: int) -> None:
    import horon

    cases = Cases()
    for name, value in (
        ("inline_bytes", 100),
        ("deposit_bytes", 64),
        ("buffer_bytes", 1 << 40),
        ("ring_bytes", 64),
        ("eager_bytes", 32 * 1024),
        ("cuda_batch_bytes", 1),
        ("claiming", "sometimes"),
        ("carrier", "pigeons"),
    ):
        with cases(f"{name}={value}"):
            options = horon.Options()
            setattr(options, name, value)
            expect_error(lambda o=options: dist.new_group(pg_options=o), "ValueError", f"option {name}", str(value))
    for name, value in (("ring_bytes", "many"), ("ring_bytes", -64), ("host_id", 7), ("claiming", True)):
        with cases(f"{name}={value!r}, of another type"):
            options = horon.Options()
            expect_error(lambda o=options, n=name, v=value: setattr(o, n, v), "TypeError")
    with cases("no option"):
        expect_error(lambda: setattr(horon.Options(), "ring", 1), "AttributeError")
    with cases("options of another backend"):
        expect_error(
            lambda: dist.new_group(backend="horon", pg_options=dist.ProcessGroupGloo._Options()),
            "TypeError",
            "horon.Options",
        )
    if hasattr(dist, "ProcessGroupNCCL"):
        with cases("NCCL's, of cpu:horon,cuda:nccl"):
            group = dist.new_group(backend="horon", pg_options=dist.ProcessGroupNCCL.Options())
            _everything_works(group, rank, size)
    with cases("ranks with different values"):
        options = horon.Options()
        options.ring_bytes = 65536 * (1 + rank)
        expect_error(lambda: dist.new_group(pg_options=options), "ValueError", "ring=65536", "ring=131072")
    with cases("and then a good one"):
        _everything_works(dist.new_group(pg_options=horon.Options()), rank, size)
    cases.check()


def test_wrong_values() -> None:
    gloo_lacks("other options")
    run_ranks(_wrong, 2)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HORON_RING_BYTES", "64k"),
        ("HORON_BUFFER_BYTES", "100"),
        ("HORON_CLAIMING", "maybe"),
        ("HORON_MOVE_THREADS", "no"),
        ("HORON_SPARSE", "yes"),
        ("HORON_LINGER_US", "5ms"),
    ],
)
def test_wrong_values_in_the_environment(variable: str, value: str) -> None:
    gloo_lacks("other options")
    run_ranks(_wrong_variable, 2, variable, value, init=False, env={variable: value})


def _wrong_variable(rank: int, size: int, variable: str, value: str) -> None:
    in_full = variable in ("HORON_MOVE_THREADS", "HORON_SPARSE", "HORON_LINGER_US") or value == "64k"
    what = variable if in_full else variable[len("HORON_") :].lower()

    def init() -> None:
        dist.init_process_group("horon", store=dist.HashStore(), rank=0, world_size=1)

    expect_error(init, "ValueError", what, value)
    assert not dist.is_initialized()
