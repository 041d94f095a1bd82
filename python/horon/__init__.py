"""horon: a torch.distributed backend in C++.

Nothing needs to be imported to use it::

    torch.distributed.init_process_group("horon")

Importing this package loads neither torch nor the extension; its names do when they are first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from horon import _version_check
from horon._version import __version__

if TYPE_CHECKING:
    from horon._arena import arena_statistics, empty, empty_like, is_in_arena, zeros
    from horon._backend import Options
    from horon._ddp_in_arena import ddp_in_arena
    from horon._gradients import SharedGradients, share_gradients
    from horon._survivors import shrink_to_survivors
    from horon.runner import run

__all__ = [
    "Options",
    "SharedGradients",
    "__version__",
    "arena_statistics",
    "ddp_in_arena",
    "empty",
    "empty_like",
    "is_in_arena",
    "run",
    "share_gradients",
    "shrink_to_survivors",
    "zeros",
]

# Where the names that need torch come from.
_MODULES = {
    "Options": "horon._backend",
    "SharedGradients": "horon._gradients",
    "arena_statistics": "horon._arena",
    "ddp_in_arena": "horon._ddp_in_arena",
    "empty": "horon._arena",
    "empty_like": "horon._arena",
    "is_in_arena": "horon._arena",
    "run": "horon.runner",
    "share_gradients": "horon._gradients",
    "shrink_to_survivors": "horon._survivors",
    "zeros": "horon._arena",
}

# Note [Import inside import torch]: torch's entry point imports this package in the middle of `import torch`, where an
# exception would break programs that never use horon. There, horon._register.autoload deals with a wrong build.
if not _version_check.is_torch_importing():
    _version_check.check()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(vars(sys.modules[__name__])) | set(__all__))
