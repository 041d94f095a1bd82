"""The "noop" backend: compiled once for each torch into build/benchmarks, by the driver; registered in the ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

kNames = ("noop", "noop-work", "noop-meet")
"""The contenders; the second and third one report to the flight recorder, the third one waits for the other ranks."""
kMovesNothing = ("fake", *kNames)
"""These, and PyTorch's own backend that does nothing."""

_SOURCE = Path(__file__).resolve().with_name("noop_backend.cc")
_LIBRARY_VARIABLE = "HORON_BENCH_NOOP"


def build() -> Path | None:
    """Returns the compiled extension, or None where that fails; the reason is then on stderr."""
    import torch

    tag = f"torch{torch.__version__}-{sys.implementation.cache_tag}"
    library = _SOURCE.parents[1] / "build" / "benchmarks" / tag / "horon_noop.so"
    if library.exists() and library.stat().st_mtime > _SOURCE.stat().st_mtime:
        return library
    from torch.utils import cpp_extension  # not earlier: its import warns where there is no GPU

    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    folder = Path(torch.__file__).parent / "lib"
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=horon_noop"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_paths()['include']}",
        *(str(_SOURCE), "-o", str(unfinished), f"-L{folder}", f"-Wl,-rpath,{folder}"),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    print(f"compiling {_SOURCE.name} for torch {torch.__version__} (once)", file=sys.stderr)
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"noop: {error}", file=sys.stderr)
        return None
    unfinished.replace(library)
    return library


def environment() -> dict[str, str]:
    """Returns what the ranks need in their environment to find the extension; builds it."""
    library = build()
    return {_LIBRARY_VARIABLE: str(library)} if library else {}


def is_built() -> bool:
    return _LIBRARY_VARIABLE in os.environ


def register() -> None:
    """Makes "noop", "noopwork" and "noopmeet" known to torch.distributed; for processes with `environment()`."""
    import torch.distributed as dist

    if "NOOP" in dist.Backend._plugins:
        return
    spec = importlib.util.spec_from_file_location("horon_noop", os.environ[_LIBRARY_VARIABLE])
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(reports: bool) -> Any:
        return lambda store, rank, size, timeout: module.create(rank, size, reports, "")

    def make_meeting(store: Any, rank: int, size: int, timeout: Any) -> Any:
        if rank == 0:
            with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="horon-noop-", delete=False) as file:
                file.truncate(module.meeting_bytes(size))
            store.set("memory", file.name)
        path = store.get("memory").decode()
        backend = module.create(rank, size, True, path)
        store.set(f"mapped {rank}", "")
        if rank == 0:
            store.wait([f"mapped {peer}" for peer in range(size)])
            os.unlink(path)
        return backend

    dist.Backend.register_backend("noop", make(reports=False), devices=["cpu"])
    dist.Backend.register_backend("noopwork", make(reports=True), devices=["cpu"])
    dist.Backend.register_backend("noopmeet", make_meeting, devices=["cpu"])
