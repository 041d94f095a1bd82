"""hvd.init() and hvd.shutdown() around the body of a test function on a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def horovod(**init_arguments: object) -> Iterator[ModuleType]:
    """Joins the harness's default group; yields horon.torch."""
    import horon.torch as hvd

    hvd.init(**init_arguments)
    try:
        yield hvd
    finally:
        hvd.shutdown()
