"""Builds libhoron_cuda_simulator.so beside a CUDA build of torch, and prints where it is.

    LD_PRELOAD=$(python tests/cuda_simulator/build.py) python -c "import torch; print(torch.ones(2).to('cuda').cpu())"

Needs g++ (or $CXX) and the headers in the wheels that torch depends on; no CUDA toolkit. What was built from the same
sources and headers is not built again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = "libhoron_cuda_simulator.so"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"]


class CannotBuild(Exception):
    """Something that it needs is not here."""


def wheels_folder() -> Path:
    """Where the wheels of NVIDIA's libraries lie: beside torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    return Path(found.origin).resolve().parents[1] / "nvidia"


def include_folders() -> list[Path]:
    """The headers of CUDA's runtime and of NCCL, as torch was built with."""
    wheels = wheels_folder()
    folders = [*sorted(wheels.glob("cu[0-9]*/include"))[-1:], wheels / "nccl" / "include"]
    for name in ("cuda_runtime_api.h", "cuda.h", "nccl.h"):
        if not any((folder / name).exists() for folder in folders):
            raise CannotBuild(f"{name} is not in {wheels}: torch is no CUDA build, or not one from wheels")
    return folders


def compiler() -> str:
    """The C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        raise CannotBuild(f"there is no {name}")
    return found


def sources_and_headers() -> Iterable[Path]:
    """Every file that the library is made from, the wheels' aside."""
    yield from sorted(path for path in HERE.rglob("*") if path.suffix in (".cc", ".h", ".inc"))
    yield from sorted((ROOT / "csrc" / "cuda").glob("*.h"))


def fingerprint(compile_with: list[str], folders: list[Path]) -> str:
    """Of all that the library depends on."""
    digest = hashlib.sha256(" ".join(compile_with).encode())
    digest.update(subprocess.run([compile_with[0], "--version"], capture_output=True, check=True).stdout)
    wheels = [folder / name for folder in folders for name in ("cuda_runtime_api.h", "nccl.h")]
    for path in [*sources_and_headers(), *wheels]:
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run(command: list[str]) -> None:
    """Runs a compiler; its messages go into the exception."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def build(cache: Path | None = None) -> Path:
    """The library, built if it is not yet there.

    Args:
        cache: Where libraries are kept, each in a folder of its own; build/cuda_simulator of the checkout if None.
    Raises:
        CannotBuild: Something is missing; the message says what.
        RuntimeError: The compiler failed.
    """
    folders = include_folders()
    ours = [f"-I{HERE}", f"-I{ROOT / 'csrc'}", f"-I{HERE / 'headers'}"]
    compile_with = [compiler(), *FLAGS, *ours, *(f"-isystem{folder}" for folder in folders)]
    target = (cache or ROOT / "build" / "cuda_simulator") / fingerprint(compile_with, folders) / LIBRARY
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may build at a time: each elsewhere, and the last one to finish stays.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = {path: str(Path(folder, path.stem + ".o")) for path in sorted(HERE.glob("*.cc"))}
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda path: run([*compile_with, "-c", str(path), "-o", objects[path]]), objects))
        made = Path(folder, LIBRARY)
        # The name makes it the libcuda.so.1 that other libraries ask for.
        link_with = [compile_with[0], "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs"]
        run([*link_with, "-o", str(made), *objects.values()])
        made.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(build())
    except (CannotBuild, RuntimeError) as error:
        sys.exit(f"the CUDA simulator cannot be built: {error}")
