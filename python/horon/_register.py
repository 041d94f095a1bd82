"""Entry points through which `init_process_group("horon")` works without `import horon`.

torch 2.15 and newer look the backend up by name (group `torch.distributed.backends`, `registrar`) when a group asks for
it. Older ones run group `torch.backends` (`autoload`) inside every `import torch`: it must be quick, may find itself
running again within itself, and must not raise, since an exception would break `import torch` for everyone. Hence no
torch import at the top of this file. See Note [Import inside import torch] in horon/__init__.py.
"""

import os
import sys
from typing import Any

from horon import _as_horovod, _instead_of_gloo

_FIRST_WITH_REGISTRAR = (2, 15)


def registrar() -> None:
    """Makes "horon" known to torch.distributed; does nothing if it already is."""
    import torch.distributed as dist

    if "HORON" not in dist.Backend._plugins:
        dist.Backend.register_backend("horon", _create_backend, extended_api=True, devices=_devices())


def _devices() -> list[str]:
    """The devices to register for: GPUs, which get a clear error, only where there is one.

    torch 2.15's flight recorder asks CUDA for its stream in every barrier of a group that has a CUDA backend, and where
    there is no GPU the exception that answers it costs 15 us. Older versions have no such hook, and register within
    `import torch`, which is too early to ask.
    """
    import torch

    has_gpu = not _torch_has_registrar_group() or torch.cuda.device_count() > 0
    return ["cpu", "cuda"] if has_gpu else ["cpu"]


def autoload() -> None:
    """Registers at `import torch` where torch does not look for `registrar`, and in Gloo's place if that is asked for.
    Never raises: what is wrong with this build is said when the backend is used, or horon imported."""
    try:
        _forget_unchecked_import()
        _as_horovod.in_front_if_asked(os.environ)
        is_only_chance = not _torch_has_registrar_group()
        if not is_only_chance and not os.environ.get(_instead_of_gloo.kVariable):
            return
        import torch.distributed as dist

        if not dist.is_available():
            return
        if is_only_chance:
            registrar()
        _instead_of_gloo.install(os.environ, _create_backend, _devices)
    except Exception as error:  # an exception here would break `import torch` for programs without horon
        import warnings

        warnings.warn(f"horon could not register with torch.distributed: {error}", stacklevel=2)


def _create_backend(options: Any, pg_options: Any) -> Any:
    """The creator that torch.distributed calls; all else is loaded here, at the first group."""
    from horon import _version_check

    _version_check.check()
    from horon._backend import create_backend

    return create_backend(options, pg_options)


def _torch_has_registrar_group() -> bool:
    from horon._version_check import installed_torch_version

    version = installed_torch_version() or "0.0"
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_WITH_REGISTRAR


def _forget_unchecked_import() -> None:
    """If horon is a wrong build, lets the next `import horon` run its check, which this import skipped."""
    from horon import _version_check

    try:
        _version_check.check()
    except ImportError:
        sys.modules.pop("horon", None)
