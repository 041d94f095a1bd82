"""Training that starts over after a failed collective. Source: Horovod 0.28.1 ``torch.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horon.common.basics import init, shutdown
from horon.common.elastic import ObjectState, State, run_fn
from horon.torch.elastic.sampler import ElasticSampler
from horon.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function ``func(state, ...)``, for a fixed set of ranks.

    Before each call the state of rank 0 is sent to all. After a HorovodInternalError the state goes back to its last
    commit, horon is shut down and started again, and the function is called anew; after a HostsUpdatedInterrupt, the
    same without going back. All ranks have to use it.

    Source: Horovod 0.28.1 ``elastic.run``.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
