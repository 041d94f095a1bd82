"""Puts another backend behind the name "gloo".

Note [Behind the name gloo]
PyTorch's suite asks for the name everywhere: `BACKEND != "gloo"`, `require_backend_is_available({"gloo"})`,
`DistTestCases.backend_feature`, `new_group(backend="gloo")`, `get_backend(group) != Backend.GLOO` in
`dist.monitored_barrier`. Rather than lift these gates one by one, the suite runs with BACKEND=gloo while the name
creates the backend under test, as a plugin of type CUSTOM (DDP's logger casts whatever has the type GLOO to
ProcessGroupGloo). The real ProcessGroupGloo stays reachable as `torch.distributed.ProcessGroupGloo`, because the
backend under test may use it inside, and torch itself uses it in the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL.

Where torch has no plugin for Gloo (before 2.15), `_new_process_group_helper` compares with `Backend.GLOO` to decide
whether to make the class itself: `_SpelledGloo` equals the name but not itself, so that comparison fails and the plugin
is used. One gate is about the spelling: profiler events are called "gloo:all_reduce"; `translate_profiler_titles`
renames ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

c10d: Any = dist.distributed_c10d

Creator = Callable[[Any, Any], Any]
"""`(c10d._DistributedBackendOptions, pg_options) -> Backend`, as `register_backend(extended_api=True)` takes it."""


def create_horon(options: Any, pg_options: Any) -> Any:
    # Here, so that nothing of horon is loaded before the rank's process is forked.
    from horon import _backend

    return _backend.create_backend(options, pg_options)


def create_renamed_gloo(options: Any, pg_options: Any) -> Any:
    """A real Gloo made by way of the replacement: it shows that the replacement itself changes nothing."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    return gloo


CREATORS: dict[str, Creator] = {"horon": create_horon, "renamed-gloo": create_renamed_gloo}
PROFILER_PREFIX: dict[str, str] = {"horon": "horon:", "renamed-gloo": "gloo:"}


class _SpelledGloo(str):
    """Equals every plain "gloo" but no other _SpelledGloo."""

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, _SpelledGloo) and str.__eq__(self, other)

    __hash__ = str.__hash__


def put_behind_gloo(backend: str) -> None:
    """Makes the name "gloo" create `backend`, a key of CREATORS, from now on in this process."""
    Backend = c10d.Backend
    kind = c10d.ProcessGroup.BackendType.CUSTOM if backend == "horon" else c10d.ProcessGroup.BackendType.GLOO
    Backend._plugins["GLOO"] = Backend._BackendPlugin(CREATORS[backend], True)
    Backend.backend_type_map["gloo"] = kind
    if not hasattr(c10d, "_create_gloo_process_group"):
        Backend.GLOO = _SpelledGloo("gloo")
    if backend == "horon":
        # torch attaches its flight recorder to whatever does not record itself, as Gloo does.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard("gloo")


def translate_profiler_titles(distributed_test: Any, backend: str) -> None:
    """Lets the suite find the events of `backend` as "gloo:<operation>"."""
    upstream = distributed_test.get_profiling_event
    prefix = PROFILER_PREFIX[backend]

    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> Any:
        if event_name.startswith("gloo:"):
            event_name = prefix + event_name.removeprefix("gloo:")
        events = upstream(event_name, *args, **kwargs)
        for event in events:
            if event.name.startswith(prefix):
                event.name = "gloo:" + event.name.removeprefix(prefix)
        return events

    distributed_test.get_profiling_event = get_profiling_event
