"""torchrun: the backend is found by name alone, with no import; restarts on the same store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from harness import BACKEND, gloo_lacks, on_gloo

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((1000,), float(rank))
dist.all_reduce(tensor)
assert (tensor == sum(range(size))).all()
if len(sys.argv) > 2 and attempt == 0 and rank == 1:
    if sys.argv[2] == "raise":
        raise RuntimeError("the first attempt fails")
    os.kill(os.getpid(), 9)
if len(sys.argv) > 2 and attempt == 0:
    try:
        dist.all_reduce(torch.ones(1000))
    finally:
        sys.exit(1)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} of {size} attempt {attempt} {dist.Backend(sys.argv[1])} done", flush=True)
"""


def _torchrun(
    folder: Path, processes: int, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    command += [str(script), BACKEND, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()  # torchrun's workers have sessions of their own and would survive it.
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _done(finished: subprocess.CompletedProcess[str], processes: int, attempt: int) -> None:
    text = f"{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}"
    assert finished.returncode == 0, text
    for rank in range(processes):
        assert f"rank {rank} of {processes} attempt {attempt} {BACKEND} done" in finished.stdout, text


def test_two_processes_without_an_import(tmp_path: Path) -> None:
    assert "import horon" not in SCRIPT
    _done(_torchrun(tmp_path, 2), 2, attempt=0)


def test_restart_after_an_exception(tmp_path: Path) -> None:
    gloo_lacks("may connect to an address of the attempt before")
    _done(_torchrun(tmp_path, 2, "raise", options=("--max-restarts=1",)), 2, attempt=1)


def test_restart_after_a_kill(tmp_path: Path) -> None:
    gloo_lacks("may connect to an address of the attempt before")
    _done(_torchrun(tmp_path, 2, "kill", options=("--max-restarts=1",)), 2, attempt=1)


def test_failure_without_restarts_is_reported(tmp_path: Path) -> None:
    finished = _torchrun(tmp_path, 2, "raise")
    assert finished.returncode != 0
    assert "the first attempt fails" in finished.stderr or on_gloo()
