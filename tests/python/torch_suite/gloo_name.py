"""Puts another backend behind the name "gloo".

PyTorch's suite asks for the name everywhere: `BACKEND != "gloo"`, `require_backend_is_available({"gloo"})`,
`DistTestCases.backend_feature`, `new_group(backend="gloo")`, `get_backend(group) != Backend.GLOO` in
`dist.monitored_barrier`. Rather than lift these gates one by one, the suite runs with BACKEND=gloo while the name
creates the backend under test: Note [Behind the name gloo] in horon/_instead_of_gloo.py. One gate is about the
spelling: profiler events are called "gloo:all_reduce"; `translate_profiler_titles` renames ours.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from horon import _instead_of_gloo


def create_horon(options: Any, pg_options: Any) -> Any:
    # Here, so that nothing of horon is loaded before the rank's process is forked.
    from horon import _backend

    return _backend.create_backend(options, pg_options)


def create_renamed_gloo(options: Any, pg_options: Any) -> Any:
    """A real Gloo made by way of the replacement: it shows what the replacement itself changes."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    return gloo


BACKENDS = ("horon", "renamed-gloo")
PROFILER_PREFIX: dict[str, str] = {"horon": "horon:", "renamed-gloo": "gloo:"}


def put_behind_gloo(backend: str) -> None:
    """Makes the name "gloo" create `backend`, one of BACKENDS, from now on in this process."""

    def devices() -> list[str]:
        return ["cpu", "cuda"]

    if backend == "horon":
        _instead_of_gloo.install({_instead_of_gloo.kVariable: "on"}, create_horon, devices)
    else:
        _instead_of_gloo.put_behind_gloo(create_renamed_gloo, devices)
        dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.GLOO  # what it is


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
