"""horon: a torch.distributed backend in C++.

Nothing needs to be imported to use it::

    torch.distributed.init_process_group("horon")

Importing this package loads neither torch nor the extension; its names do when they are first used.
"""

import sys
from typing import TYPE_CHECKING, Any

from horon import _version_check
from horon._version import __version__

if TYPE_CHECKING:
    from horon._backend import Options

__all__ = ["Options", "__version__"]

# Note [Import inside import torch]: torch's entry point imports this package in the middle of `import torch`, where an
# exception would break programs that never use horon. There, horon._register.autoload deals with a wrong build.
if not _version_check.is_torch_importing():
    _version_check.check()


def __getattr__(name: str) -> Any:
    if name == "Options":
        from horon._backend import Options

        return Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(vars(sys.modules[__name__])) | set(__all__))
