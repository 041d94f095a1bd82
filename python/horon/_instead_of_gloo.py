"""HORON_INSTEAD_OF_GLOO=on: what asks torch.distributed for the backend "gloo" gets horon, under that name.

Note [Behind the name gloo]
Programs and libraries name Gloo in their code, and look at the name again later: `get_backend() == "gloo"` is how they
find out that they have to send CPU tensors. So the name stays, and what it makes is exchanged: for a plugin, of type
CUSTOM, since DDP's logger casts what has the type GLOO to ProcessGroupGloo. That class is left alone: horon uses it
between hosts when its own connections can not be had, and torch's debug mode beside any group.

From torch 2.15 on, Gloo is a plugin like others. Before, `_new_process_group_helper` makes the class itself for what
equals `Backend.GLOO`. The names that it compares come from a `BackendConfig`: it gets one that calls Gloo by a
`_StandIn`, which reads "gloo" and is not equal to it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from horon._words import is_on

kVariable = "HORON_INSTEAD_OF_GLOO"

Creator = Callable[[Any, Any], Any]
"""``(c10d._DistributedBackendOptions, pg_options) -> Backend``: what ``register_backend(extended_api=True)`` takes."""


def install(environment: Mapping[str, str], create_horon: Creator, devices: Callable[[], list[str]]) -> None:
    """Does what ``HORON_INSTEAD_OF_GLOO`` says; a word that says neither yes nor no is an error of Gloo's groups."""
    error: ValueError | None = None
    try:
        if not is_on(environment, kVariable):
            return
    except ValueError as caught:
        error = caught

    def create(options: Any, pg_options: Any) -> Any:
        if error is not None:
            raise error
        return create_horon(options, _for_horon(pg_options))

    put_behind_gloo(create, devices)


def put_behind_gloo(create: Creator, devices: Callable[[], list[str]]) -> None:
    """Lets ``create`` make the groups, or the CPU's part of them, for which this process asks Gloo from now on.

    Args:
        create: Makes a group.
        devices: Tells, when a group is made, which devices one has that is for all of them.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    backend: Any = dist.Backend
    backend._plugins["GLOO"] = backend._BackendPlugin(create, True)
    backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    # torch attaches its flight recorder to whatever does not record itself, as Gloo does. New in torch 2.15.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard("gloo")
    is_built_in = not hasattr(c10d, "_create_gloo_process_group")
    if is_built_in:
        c10d.BackendConfig = _with_stand_ins(c10d.BackendConfig)
    c10d._new_process_group_helper = _wrap_helper(c10d, c10d._new_process_group_helper, devices, is_built_in)


def _for_horon(pg_options: Any) -> Any:
    """Returns what horon takes for the `pg_options` of a group that was asked of Gloo.

    Gloo looks at none, so whatever is not horon's has no effect. It adds up sparse tensors without being asked to, and
    so does what stands in its place, unless HORON_SPARSE says no.
    """
    from horon._backend import Options

    if isinstance(pg_options, Options):
        return pg_options
    options = Options()
    if not os.environ.get("HORON_SPARSE"):
        options.sparse = True
    return options


class _StandIn(str):
    """Reads like a string, and equals nothing but itself."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = str.__hash__


def _with_stand_ins(config: Any) -> Any:
    """Returns a BackendConfig that gives the function that makes groups no "gloo" that it would know."""
    stand_in = _StandIn("gloo")

    class BackendConfig(config):  # type: ignore[misc]
        def get_device_backend_map(self) -> dict[str, str]:
            names = super().get_device_backend_map()
            return {device: stand_in if name == "gloo" else name for device, name in names.items()}

    return BackendConfig


def _wrap_helper(
    c10d: Any, helper: Callable[..., Any], devices: Callable[[], list[str]], is_built_in: bool
) -> Callable[..., Any]:
    """Returns torch's `helper`, which makes groups, with what has to be done before and after it."""
    signature = inspect.signature(helper)
    custom = c10d.ProcessGroup.BackendType.CUSTOM

    @functools.wraps(helper)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        c10d.Backend.backend_capability["gloo"] = devices()
        _check_no_other(c10d, str(signature.bind(*args, **kwargs).arguments["backend"]))
        group, store = helper(*args, **kwargs)
        # Of a group without a named backend, and of "cpu:gloo", torch took for granted that GLOO is the type.
        config = c10d._world.pg_backend_config.get(group, "")
        if is_built_in and config and all(part.endswith(":gloo") for part in config.split(",")):
            group._set_default_backend(custom)
        return group, store

    return new_process_group_helper


def _check_no_other(c10d: Any, name: str) -> None:
    """Raises ValueError for a group with a backend that torch would mix up with the one behind the name "gloo"."""
    types, custom = c10d.Backend.backend_type_map, c10d.ProcessGroup.BackendType.CUSTOM
    parts = [part.partition(":")[2] for part in name.lower().split(",")]
    others = [part for part in parts if part not in ("", "gloo", "horon") and types.get(part, custom) == custom]
    if "gloo" in parts and others:
        raise ValueError(
            f"{kVariable}: of the backends that do not come with torch, a group can have one, and {name!r} has "
            f"{others[0]} besides what stands in Gloo's place. Unset the variable for this program."
        )
