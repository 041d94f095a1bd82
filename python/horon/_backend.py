"""Makes horon's process groups for torch.distributed. Imported when the first group is made."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

from horon import _version_check

_version_check.check()

import torch.distributed as dist  # noqa: E402  (after the version check, which gives a clear error)

from horon import (  # noqa: E402
    _C,
    _ddp_in_arena,
)
from horon import _where as _where  # noqa: E402  (C++ asks it, and must not have to read a file then)
from horon._joined import tell_launcher  # noqa: E402
from horon._newcomers import check_may_meet  # noqa: E402

Options = _C.Options

# How long a process that exits without destroying its groups lets pending operations finish.
_DRAIN_AT_EXIT = timedelta(seconds=2)


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes the Gloo group that carries bytes between hosts, where horon's own connections do not."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def create_backend(opts: Any, pg_options: Any = None) -> Any:
    """Makes the backend of one process group; torch.distributed calls this.

    Args:
        opts: torch's ``_DistributedBackendOptions``.
        pg_options: ``horon.Options``, or None for the defaults. NCCL's are taken for None: torch passes
            one object to the backends of all devices.

    Returns:
        A ``c10d::Backend``. Blocks until every rank of the group has come, unless ``opts`` asks for a group that gets
        its members later, by ``reconfigure``.

    Raises:
        TypeError: ``pg_options`` is of another backend.
        RuntimeError: This process was started in the place of a rank that has died, and the others did not let it in.
        torch.distributed.DistBackendError: A rank did not come within the timeout.
    """
    check_may_meet(os.environ)
    _ddp_in_arena.install(os.environ)
    if pg_options is None:
        options = Options()
    elif isinstance(pg_options, Options):
        options = pg_options.__copy__()
    elif getattr(pg_options, "backend", None) == "nccl":  # "cpu:horon,cuda:nccl": both get the same ones
        options = Options()
    else:
        raise TypeError(f"horon: pg_options: expected horon.Options, got {type(pg_options).__name__}")
    options._timeout = opts.timeout
    options.global_ranks_in_group = list(opts.global_ranks_in_group)
    options.group_name = opts.group_id
    is_empty = getattr(opts, "enable_reconfigure", False)  # new in torch 2.15
    backend = _C.create_backend(opts.store, opts.group_rank, opts.group_size, options, make_gloo, is_empty)
    tell_launcher()
    return backend


# Registered once per process: said goodbye before the interpreter takes threads and tensors apart.
atexit.register(_C.shutdown_all, _DRAIN_AT_EXIT)
