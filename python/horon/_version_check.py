"""Is this build of horon one for the torch and the Python that are running? Asked before the extension is loaded, which
would fail with an undefined symbol, or crash later. Imports no torch."""

import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_REBUILD = "Rebuild it, in its source tree: pip install --no-build-isolation --force-reinstall --no-deps ."


def check() -> None:
    """Raises ImportError, saying what to do, unless horon was built for this torch and this Python."""
    try:
        from horon import _build_info
    except ImportError:
        raise ImportError(
            "horon was not built: its extension is missing. In the source tree run: pip install --no-build-isolation ."
        ) from None
    running_tag = f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    if running_tag != _build_info.PYTHON_TAG:
        raise ImportError(f"horon was built for Python {_build_info.PYTHON_TAG}, but this is {running_tag}. {_REBUILD}")
    if not _has_extension():
        raise ImportError(
            f"horon's extension, _C{EXTENSION_SUFFIXES[0]}, is missing from {Path(__file__).parent}. {_REBUILD}"
        )
    installed = installed_torch_version()
    if installed is None:
        raise ImportError(
            "horon needs torch, which is not installed. It was built for torch "
            f"{_build_info.TORCH_VERSION}: pip install torch"
        )
    if major_minor(installed) != major_minor(_build_info.TORCH_VERSION):
        raise ImportError(
            f"horon was built for torch {major_minor(_build_info.TORCH_VERSION)}, but torch {major_minor(installed)} "
            f"({installed}) is installed. {_REBUILD}"
        )


def is_torch_importing() -> bool:
    """Whether this runs inside `import torch`, as its entry points do."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def installed_torch_version() -> str | None:
    """Of the torch that is imported, else of the one that would be; None if there is none."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def major_minor(version: str) -> str:
    """ "2.15" of "2.15.0+cu132"."""
    return ".".join(version.split(".")[:2])


def _has_extension() -> bool:
    folder = Path(__file__).parent
    return any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
