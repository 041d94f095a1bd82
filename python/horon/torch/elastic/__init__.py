"""Training that starts over after a failed collective. Source: Horovod 0.28.1 ``torch.elastic``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from horon.common._context import default_context
from horon.common._elastic_settings import elastic_settings
from horon.common.basics import init, shutdown
from horon.common.elastic import ObjectState, State, run_fn
from horon.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horon.torch.elastic.sampler import ElasticSampler
from horon.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function ``func(state, ...)`` that starts over after a failure.

    Before each call the state of rank 0 is sent to all. After a HorovodInternalError the state goes back to its last
    commit, horon is shut down and started again, and the function is called anew; after a HostsUpdatedInterrupt, the
    same without going back, and with those that have come. All ranks have to use it.

    With HORON_ELASTIC_MIN_NP set, as ``horonrun --min-np`` does, ranks that have died are left behind, and the others
    are numbered anew; without it, all have to come again. The launcher must not end the job when a rank dies, and the
    store must not be in a rank that does: both hold for horonrun.

    Raises:
        ValueError: A setting is no positive number.

    Source: Horovod 0.28.1 ``elastic.run``.
    """
    elastic_settings(os.environ)  # what is wrong with them is said now, and not when a rank is lost

    @functools.wraps(func)
    def told_all(*args: Any, **kwargs: Any) -> Any:
        default_context.enter_loop()
        try:
            return func(*args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            if interrupt.skip_sync and default_context.may_grow:  # somebody may be let in, who has to be told the state
                raise HostsUpdatedInterrupt(False) from interrupt
            raise

    return run_fn(told_all, _reset)


def _reset() -> None:
    settings = elastic_settings(os.environ)
    failed: RuntimeError | None = None
    while True:
        shutdown()  # first: those that still wait in something learn that they are to come, too
        has_changed = settings is not None and default_context.agree_who_goes_on(settings.least, settings.timeout)
        if failed is not None and not has_changed:
            raise failed
        try:
            init()
            return
        except (dist.DistBackendError, HorovodInternalError) as error:  # most likely another one has died since
            if settings is None:
                raise
            failed = error
