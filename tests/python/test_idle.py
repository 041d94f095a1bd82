"""An idle process uses no CPU: none of our threads wakes up while nothing happens (Linux)."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, on_gloo, run_fresh_processes, store
from operations import KINDS, start

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(on_gloo(), reason="gloo: a promise of ours alone"),
]
IDLE_S = 10


def _switches() -> dict[str, int]:
    """Voluntary context switches of horon's threads."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if fields["Name"].strip().startswith("horon"):
            counts[f"{fields['Name'].strip()} {task.name}"] = int(fields["voluntary_ctxt_switches"])
    return counts


def _meet(name: str) -> None:
    """All ranks are here: by the store, which wakes none of horon's threads."""
    meeting = store()
    meeting.set(f"{name} {dist.get_rank()}", "here")
    meeting.wait([f"{name} {rank}" for rank in range(dist.get_world_size())])


def _assert_idle(name: str) -> None:
    """Nothing wakes up between two meetings of all ranks, so that none of them is busy while another one looks."""
    _meet(f"before {name}")
    time.sleep(1)
    before = _switches()
    processor_s = time.process_time()
    time.sleep(IDLE_S)
    used_s = time.process_time() - processor_s
    after = _switches()
    _meet(f"after {name}")
    assert before, "horon's threads were not found by their names"
    woken = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert not woken, f"threads that woke up in {IDLE_S} idle seconds: {woken}"
    assert used_s < 0.05, f"{used_s:.3f} s of processor time in {IDLE_S} idle seconds"


def _idle(rank: int, world_size: int) -> None:
    group = dist.new_group()
    for kind in KINDS:
        for count in (10, 300000):
            start(kind, rank, world_size, count)[0].wait()
    done = threading.Event()
    dist.all_reduce(torch.ones(70001), group=group, async_op=True).get_future().then(lambda _: done.set())
    assert done.wait(20), "the callback never ran"
    (dist.send if rank == 0 else dist.recv)(torch.ones(300000), 1 - rank)
    dist.barrier()
    _assert_idle("after collectives")
    dist.destroy_process_group()


def test_no_thread_wakes_up_when_idle() -> None:
    assert_clean_exits(run_fresh_processes(_idle, 2))


def _late(rank: int, world_size: int) -> None:
    """What a rank waits in uses no processor either, but for a moment at its beginning."""
    import horon.torch as hvd

    hvd.init()
    tensor = torch.ones(8)
    waits = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "message": lambda: (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank),
        "named": lambda: hvd.allreduce(tensor, name="late"),
    }
    for name, wait in waits.items():
        _meet(f"before {name}")
        if rank == 0:
            time.sleep(2)
        processor_s = time.process_time()
        wait()
        used_s = time.process_time() - processor_s
        assert used_s < 0.3, f"{name}: {used_s:.3f} s of processor time in a wait of 2 s"
    hvd.shutdown()


def test_long_waits_use_no_processor() -> None:
    assert_clean_exits(run_fresh_processes(_late, 2))


def _idle_horovod(rank: int, world_size: int) -> None:
    import horon.torch as hvd

    hvd.init()
    _assert_idle("after init")
    handles = [hvd.allreduce_async(torch.ones(1000 + i), name=str(i)) for i in range(100)]
    for handle in handles:
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(300000), op=hvd.Sum)[0] == world_size
    hvd.broadcast_object(rank)
    hvd.barrier()
    _assert_idle("after operations")
    hvd.shutdown()


def test_no_thread_wakes_up_when_idle_after_horovod_init() -> None:
    assert_clean_exits(run_fresh_processes(_idle_horovod, 2))
