"""Where do we meet? Makes the c10d Store through which the ranks of a job find each other."""

from __future__ import annotations

import os
import stat
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from horon.common._launch import Launch


def make_store(launch: Launch, timeout: timedelta) -> Any:
    """Makes the job's store. Blocks until rank 0 serves it.

    torchrun, and whatever it started: its own (``env://``). With MASTER_ADDR and MASTER_PORT: a TCPStore there, served
    by rank 0. Under mpirun and srun on one host: a file in the job's session folder. Alone: in this process.

    Raises:
        ValueError: Nothing says where to meet, or how many ranks there are.
        torch.distributed.DistStoreError: Rank 0 did not come within `timeout`.
    """
    if launch.launcher == "pmix":
        raise ValueError(
            "horon: PMIX_RANK is set, so a launcher has started this process, but nothing says how many there are. "
            "Set HOROVOD_RANK and HOROVOD_SIZE, MASTER_ADDR to a host name of rank 0 and MASTER_PORT to a free port "
            "there; for a process of its own, HOROVOD_RANK=0 and HOROVOD_SIZE=1."
        )
    if launch.size == 1 and not launch.has_agent:
        return dist.HashStore()
    has_master = launch.master_addr is not None and launch.master_port is not None
    if launch.has_agent and has_master:
        store, _, _ = next(iter(dist.rendezvous("env://", launch.rank, launch.size, timeout=timeout)))
        return store
    if has_master:
        assert launch.master_addr is not None
        assert launch.master_port is not None
        return dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.size,
            is_master=launch.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # so that init_process_group("...", init_method="env://") can serve on the same port
        )
    if launch.job_id is not None and launch.is_one_host:
        return dist.FileStore(str(_private_folder(launch) / f"store-{launch.job_id}"), launch.size)
    raise ValueError(
        f"horon: {launch.size} ranks (found by the variables of {launch.launcher}) do not know where to meet: set "
        "MASTER_ADDR to a host name of rank 0 and MASTER_PORT to a free port there, the same for all ranks "
        "(mpirun: -x MASTER_ADDR=... -x MASTER_PORT=...; horovodrun on one host: MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT=29500 horovodrun ...; srun: export both before it, as the address "
        "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))."
    )


def _private_folder(launch: Launch) -> Path:
    """The launcher's session folder, which ends with the job; else one of our own that no other user can write to."""
    if launch.session_folder is not None and os.access(launch.session_folder, os.W_OK | os.X_OK):
        return Path(launch.session_folder)
    folder = Path(tempfile.gettempdir()) / f"horon-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"horon: {folder} is not a folder that only this user can write to; remove it.")
    return folder
