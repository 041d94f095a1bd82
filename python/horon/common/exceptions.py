"""Exceptions of the Horovod-compatible API. Source: Horovod 0.28.1 ``horovod.common.exceptions``."""

from __future__ import annotations

import torch  # noqa: F401  (the extension needs its libraries)

from horon import _C

HorovodInternalError = _C.HorovodInternalError
"""A collective failed on every rank (mismatch between ranks, shutdown, a lost rank). A RuntimeError. After a mismatch
the next operation works; :func:`horon.torch.elastic.run` takes it as the signal to restore and start over."""


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class NotInitializedError(HorovodInternalError, ValueError):
    """A collective before ``hvd.init()`` or after ``hvd.shutdown()``, as in Horovod; a ValueError besides."""

    def __init__(self) -> None:
        super().__init__(NOT_INITIALIZED)


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; :func:`horon.torch.elastic.run` starts over and keeps the state.

    Args:
        skip_sync: Whether the state need not be broadcast again (hosts were only removed).
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for scripts that catch it. horon raises ImportError itself, when a build does not fit the installed torch.

    Args:
        name: Of the framework.
        version: That was found.
        installed_version: That the build was made for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version {version}. "
            "Rebuild horon, in its source tree: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
