"""HORON_INSTEAD_OF_GLOO=on: what asks torch.distributed for the backend "gloo" gets horon, under that name.

Note [Behind the name gloo]
Programs and libraries name Gloo in their code, and look at the name again later: `get_backend() == "gloo"` is how they
find out that they have to send CPU tensors. So the name stays, and what it makes is exchanged: for a plugin, of type
CUSTOM, since DDP's logger casts what has the type GLOO to ProcessGroupGloo. That class is left alone: horon uses it
between hosts when its own connections can not be had, and torch's debug mode beside any group.

From torch 2.15 on, Gloo is a plugin like others. Before, `_new_process_group_helper` makes the class itself for what
equals `Backend.GLOO`. While it runs, that is a `_SpelledGloo`, which equals every plain "gloo", but not what the helper
compares with it, which has been looked up in `Backend` meanwhile and so is the same object.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

kVariable = "HORON_INSTEAD_OF_GLOO"

_ON = ("on", "1", "true", "yes")
_OFF = ("", "off", "0", "false", "no")

Creator = Callable[[Any, Any], Any]
"""``(c10d._DistributedBackendOptions, pg_options) -> Backend``: what ``register_backend(extended_api=True)`` takes."""


def install(environment: Mapping[str, str], create_horon: Creator) -> None:
    """Does what ``HORON_INSTEAD_OF_GLOO`` says; a word that says neither yes nor no is an error of Gloo's groups."""
    text = environment.get(kVariable, "").strip().lower()
    if text in _OFF:
        return

    def create(options: Any, pg_options: Any) -> Any:
        if text not in _ON:
            raise ValueError(f"{kVariable}: expected on or off, got {environment[kVariable]!r}")
        return create_horon(options, _for_horon(pg_options))

    put_behind_gloo(create)


def put_behind_gloo(create: Creator) -> None:
    """Lets ``create`` make the groups, or the CPU's part of them, for which this process asks Gloo from now on."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    backend: Any = dist.Backend
    backend._plugins["GLOO"] = backend._BackendPlugin(create, True)
    backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    # torch attaches its flight recorder to whatever does not record itself, as Gloo does. New in torch 2.15.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard("gloo")
    if not hasattr(c10d, "_create_gloo_process_group"):
        c10d._new_process_group_helper = _without_built_in_gloo(c10d, c10d._new_process_group_helper)


def _for_horon(pg_options: Any) -> Any:
    """Returns what horon takes for the `pg_options` of a group that was asked of Gloo.

    Gloo's own options are threads and network devices, which mean nothing here (the timeout comes apart from them).
    Gloo adds up sparse tensors without being asked to: so does what stands in its place, unless HORON_SPARSE says no.
    """
    import torch.distributed as dist

    from horon._backend import Options

    gloo: Any = dist.ProcessGroupGloo
    if pg_options is not None and not isinstance(pg_options, gloo._Options):
        return pg_options
    options = Options()
    if not os.environ.get("HORON_SPARSE"):
        options.sparse = True
    return options


class _SpelledGloo(str):
    """Equals every plain "gloo" but no other _SpelledGloo."""

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, _SpelledGloo) and str.__eq__(self, other)

    __hash__ = str.__hash__


def _without_built_in_gloo(c10d: Any, helper: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's `helper`, which makes groups, without its own way of making those of Gloo."""
    plain, spelled = c10d.Backend.GLOO, _SpelledGloo("gloo")
    lock, callers = threading.Lock(), 0

    def count(change: int) -> None:
        nonlocal callers
        with lock:
            callers += change
            c10d.Backend.GLOO = spelled if callers > 0 else plain

    @functools.wraps(helper)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        count(+1)
        try:
            group, store = helper(*args, **kwargs)
        finally:
            count(-1)
        # Of a group without a named backend, and of "cpu:gloo", torch takes for granted that GLOO is the type.
        config = c10d._world.pg_backend_config.get(group, "")
        if config and all(part.endswith(":gloo") for part in config.split(",")):
            group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
        return group, store

    return new_process_group_helper
