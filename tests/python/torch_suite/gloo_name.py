"""Puts another backend behind the name "gloo".

Note [Behind the name gloo]
PyTorch's suite asks for the name everywhere: `BACKEND != "gloo"`, `require_backend_is_available({"gloo"})`,
`DistTestCases.backend_feature`, `new_group(backend="gloo")`, `get_backend(group) != Backend.GLOO` in
`dist.monitored_barrier`, the backend type in DDP's logger. Rather than lift these gates one by one, the suite runs with
BACKEND=gloo while the name creates the backend under test. The real ProcessGroupGloo stays reachable as
`torch.distributed.ProcessGroupGloo`, because the backend under test may use it inside, and torch itself uses it in the
wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL.

Where the name is a registered plugin (torch 2.15), the plugin is registered anew. Where `_new_process_group_helper`
calls the class (2.13), the class is replaced in `distributed_c10d` by a stand-in. One gate is not about the name's
meaning but its spelling: profiler events are called "gloo:all_reduce"; `translate_profiler_titles` maps them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

c10d: Any = dist.distributed_c10d

Creator = Callable[[Any, Any], Any]
"""`(c10d._DistributedBackendOptions, pg_options) -> Backend`, as `register_backend(extended_api=True)` takes it."""


def create_horon(options: Any, pg_options: Any) -> Any:
    from horon import (
        _backend,
    )  # here, so that nothing of horon is loaded before the rank's process is forked

    return _backend.create_backend(options, pg_options)


def create_renamed_gloo(options: Any, pg_options: Any) -> Any:
    """A real Gloo made by way of the replacement: it shows that the replacement itself changes nothing."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    return gloo


CREATORS: dict[str, Creator] = {"horon": create_horon, "renamed-gloo": create_renamed_gloo}
PROFILER_PREFIX: dict[str, str] = {"horon": "horon:", "renamed-gloo": "gloo:"}


def put_behind_gloo(backend: str) -> None:
    """Makes the name "gloo" create `backend`, a key of CREATORS, from now on in this process."""
    creator = CREATORS[backend]
    if hasattr(c10d, "_create_gloo_process_group"):
        c10d.Backend.register_backend(
            "gloo",
            creator,
            extended_api=True,
            devices=list(c10d.Backend.backend_capability["gloo"]),
            _backend_type=c10d.ProcessGroup.BackendType.GLOO,
        )
    else:
        _replace_class(creator)
    if backend == "horon":
        # torch attaches its flight recorder to whatever does not record itself, as Gloo does.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard("gloo")


def translate_profiler_titles(distributed_test: Any, backend: str) -> None:
    """Lets the suite find "gloo:<operation>" under the title that `backend` gives to it."""
    upstream = distributed_test.get_profiling_event
    prefix = PROFILER_PREFIX[backend]

    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> Any:
        if event_name.startswith("gloo:"):
            event_name = prefix + event_name.removeprefix("gloo:")
        return upstream(event_name, *args, **kwargs)

    distributed_test.get_profiling_event = get_profiling_event


def _replace_class(creator: Creator) -> None:
    """For torch where the name gloo is hard-wired to the class; see Note [Behind the name gloo]."""
    real_gloo = c10d.ProcessGroupGloo
    real_helper = c10d._new_process_group_helper
    signature = inspect.signature(real_helper)
    in_construction: list[dict[str, Any]] = []  # arguments of the helper's calls; nested ones only through the creator
    created: set[type] = {real_gloo}

    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        in_construction.append(dict(bound.arguments))
        try:
            return real_helper(*args, **kwargs)
        finally:
            in_construction.pop()

    class StandInType(type):
        """Is called as the class is, and recognises the backends that it made."""

        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            if not in_construction or not in_construction[-1]:
                return real_gloo(store, rank, size, timeout=timeout)
            group, in_construction[-1] = (
                in_construction[-1],
                {},
            )  # the DETAIL wrapper's helper group stays a real Gloo
            options = c10d._DistributedBackendOptions()
            options.store = store
            options.group_rank = rank
            options.group_size = size
            options.timeout = timeout
            options.group_id = group["group_name"]
            options.global_ranks_in_group = group["global_ranks_in_group"]
            backend = creator(options, group.get("backend_options"))
            created.add(type(backend))
            return backend

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, tuple(created))

        def __getattr__(cls, name: str) -> Any:
            return getattr(real_gloo, name)

    class ProcessGroupGloo(metaclass=StandInType):
        """Stands for the real class in `distributed_c10d` only."""

    c10d._new_process_group_helper = new_process_group_helper
    c10d.ProcessGroupGloo = ProcessGroupGloo
