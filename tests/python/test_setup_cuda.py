"""What setup.py decides about the GPU parts: with which nvcc and NCCL, for which architectures, or why not."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch

# What a user may set.
VARIABLES = (
    "HORON_CUDA",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDACXX",
    "CUDAHOSTCXX",
    "CUDAFLAGS",
    "TORCH_CUDA_ARCH_LIST",
)
SETUP = Path(__file__).resolve().parents[2] / "setup.py"


@pytest.fixture
def setup_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module: setup() itself does nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("horon_setup", SETUP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "horon_setup", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch of CUDA 13.2 with NVIDIA's wheels beside it, and an nvcc of 13.0 in CUDACXX."""
    for name in ("torch/__init__.py", "nvidia/nccl/include/nccl.h", "nvidia/nccl/lib/libnccl.so.2"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "nvidia/cu13/include").mkdir(parents=True)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("CUDACXX", str(write_nvcc(tmp_path, "13.0")))
    return tmp_path


def write_nvcc(folder: Path, version: str) -> Path:
    """A program that says it is nvcc."""
    nvcc = folder / f"nvcc-{version}"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize(
    ("torch_list", "toolkit", "expected"),
    [
        ("", (13, 0), "80-real;86-real;89-real;90-real;100"),
        ("", (12, 4), "80-real;86-real;89-real;90"),
        ("9.0", (13, 0), "90-real"),
        ("8.0 9.0a;10.0+PTX", (13, 0), "80-real;90a-real;100"),
    ],
)
def test_architectures(setup_module: ModuleType, torch_list: str, toolkit: tuple[int, int], expected: str) -> None:
    assert setup_module.cuda_architectures(torch_list, toolkit) == expected


def test_unknown_architecture(setup_module: ModuleType) -> None:
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST has 'fast'"):
        setup_module.cuda_architectures("8.0;fast", (13, 0))


def test_found(setup_module: ModuleType, cuda_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORON_CUDA", "1")
    arguments = setup_module.cuda_build().cmake_arguments()
    assert f"-DCMAKE_CUDA_COMPILER={cuda_machine}/nvcc-13.0" in arguments
    assert f"-DHORON_NCCL_LIBRARY={cuda_machine}/nvidia/nccl/lib/libnccl.so.2" in arguments
    assert f"-DHORON_CUDA_EXTRA_INCLUDE_DIRS={cuda_machine}/nvidia/cu13/include" in arguments


def test_cpu_torch(
    setup_module: ModuleType,
    cuda_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert setup_module.cuda_build() is None
    assert "is not a CUDA build" in capsys.readouterr().out
    monkeypatch.setenv("HORON_CUDA", "1")
    with pytest.raises(SystemExit, match="is not a CUDA build"):
        setup_module.cuda_build()


def test_not_wanted(setup_module: ModuleType, cuda_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_module.cuda_build() is not None
    monkeypatch.setenv("HORON_CUDA", "0")
    assert setup_module.cuda_build() is None
    monkeypatch.setenv("HORON_CUDA", "perhaps")
    with pytest.raises(SystemExit, match="expected auto, 0 or 1"):
        setup_module.cuda_build()


def test_toolkit_of_another_major_version(
    setup_module: ModuleType, cuda_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", str(write_nvcc(cuda_machine, "12.8")))
    assert "is of CUDA 12.8" in setup_module.find_cuda_build()


def test_no_nccl(setup_module: ModuleType, cuda_machine: Path) -> None:
    (cuda_machine / "nvidia/nccl/include/nccl.h").unlink()
    assert "pip install nvidia-nccl-cu13" in setup_module.find_cuda_build()


NVCC_THAT_DOES_NOT_COMPILE = """#!/bin/sh
if [ "$1" = --version ]; then
  echo "Cuda compilation tools, release 13.0, V13.0.88"
elif [ "$1" != -ccbin=g++-15 ]; then
  echo "In file included from cuda_runtime.h:82:" >&2
  echo "host_config.h:137:2: error: #error -- unsupported GNU version!" >&2
  exit 1
fi
"""


def test_nvcc_that_does_not_know_the_compiler(
    setup_module: ModuleType, cuda_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = write_nvcc(cuda_machine, "13.0")
    nvcc.write_text(NVCC_THAT_DOES_NOT_COMPILE)
    assert setup_module.cuda_build() is None
    said = capsys.readouterr().out
    assert "without its GPU parts" in said
    assert "does not compile here: host_config.h:137:2: error: #error -- unsupported GNU version!" in said
    assert "CUDAHOSTCXX names another C++ compiler" in said
    monkeypatch.setenv("HORON_CUDA", "1")
    with pytest.raises(SystemExit, match="unsupported GNU version"):
        setup_module.cuda_build()
    monkeypatch.setenv("CUDAHOSTCXX", "g++-15")
    assert setup_module.cuda_build() is not None
