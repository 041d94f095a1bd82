"""Two hosts, as network namespaces with a cable between them: they share neither sockets nor, so, memory.

Needs root and `ip` (Debian: iproute2).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    import horon.torch as hvd

    victim = int(sys.argv[1])
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert not dist.group.WORLD._get_backend(torch.device("cpu")).is_shared
    for i in range(20):
        names = ["a", "b", "c"] if rank % 2 else ["c", "a", "b"]
        handles = {n: hvd.allreduce_async(torch.full((1000,), float(rank)), name=n, op=hvd.Sum) for n in names}
        for name in sorted(handles):
            assert (hvd.synchronize(handles[name]) == sum(range(size))).all()
    tensor = torch.full((300_000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(size))).all()
    hvd.barrier()
    if victim < 0:
        hvd.shutdown()
    elif rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        try:
            hvd.allreduce(torch.ones(3), name="after")
        except hvd.HorovodInternalError as error:
            assert f"rank {victim} (pid" in str(error), error
        else:
            raise AssertionError("no error")
    print("fine")
    """
)


@dataclass
class Host:
    """A network namespace, and the end of the cable in it."""

    namespace: str
    interface: str
    address: str


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (iproute2)")
    tag = f"hrn{os.getpid()}"
    made = [Host(f"{tag}{end}", f"{tag}{end}", f"10.77.0.{number}") for number, end in enumerate("ab", 1)]
    try:
        try:
            for host in made:
                _ip("netns", "add", host.namespace)
            ends = [["netns", host.namespace] for host in made]
            _ip("link", "add", made[0].interface, *ends[0], "type", "veth", "peer", "name", made[1].interface, *ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for host in made:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


@pytest.mark.parametrize("victim", [-1, 0, 3])
def test_two_hosts(hosts: list[Host], tmp_path: Path, victim: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    processes = []
    for rank in range(4):
        host = hosts[rank // 2]
        places = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in places.items()},
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29500",  # nobody else is in the namespace
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
            "TORCH_INCLUDE_STACK_TRACE": "0",
        }
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, sys.executable, str(program), str(victim)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == (-signal.SIGKILL if rank == victim else 0), (rank, output)
        assert ("fine" in output) == (rank != victim), (rank, output)
