"""Builds horon: CMake compiles the engine and the extension, setuptools packages them.

    pip install torch setuptools wheel cmake ninja    # torch 2.11 to 2.15
    pip install --no-build-isolation .                # or -e .

One build serves one torch minor version and one Python: c10d has no stable ABI. Everything goes through build/<tag>
(say build/cp311-torch2.15), which is kept, so that the next build compiles only what changed.

The GPU parts are built where torch is a CUDA build and nvcc of the same major version is found (CUDACXX, CUDA_HOME,
/usr/local/cuda, PATH). HORON_CUDA=0 leaves them out, HORON_CUDA=1 makes it an error where they can not be built;
TORCH_CUDA_ARCH_LIST chooses the architectures.

A build to be installed compiles a dozen files at a time, which takes half as long; one in place (-e, build_ext
--inplace) compiles each by itself, so that a change takes seconds. HORON_UNITY=1 or 0 chooses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Before torch is imported: an installed horon must not be loaded by the build that replaces it.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TORCH_MINIMUM = (2, 11)
TORCH_BELOW = (2, 16)
CMAKE_MINIMUM = (3, 18)
UNITY_BATCH_SIZE = 12  # files; more of them leave cores without work


def stop(message: str) -> NoReturn:
    """Ends the build with a message that pip shows as its last lines, without a traceback."""
    sys.exit(f"\nhoron cannot be built here: {message}\n")


def torch_version() -> str:
    """The installed torch's version; ends the build where there is none, or one that is not supported."""
    try:
        import torch
    except ImportError as error:
        stop(
            f"torch cannot be imported ({error}).\n"
            "pip's isolated build does not see the torch that is installed, and would fetch another one.\n"
            "Use:  pip install torch setuptools wheel cmake ninja\n"
            "      pip install --no-build-isolation ."
        )
    version = str(torch.__version__)
    if not TORCH_MINIMUM <= major_minor(version) < TORCH_BELOW:
        lowest, below = (".".join(map(str, bound)) for bound in (TORCH_MINIMUM, TORCH_BELOW))
        stop(f"torch is {version}; supported is torch>={lowest},<{below}.")
    return version


def major_minor(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0+cu132"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def python_tag() -> str:
    """ "cp311"; "cp314t" without a global interpreter lock."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


def build_folder() -> Path:
    """build/cp311-torch2.15, relative to the root: what is built for one Python and one torch stays apart."""
    try:
        import torch
    except ImportError:  # sdist and metadata need no torch; build_ext says what to do
        return Path("build", python_tag())
    return Path("build", "{}-torch{}.{}".format(python_tag(), *major_minor(str(torch.__version__))))


def build_id(version: str) -> str:
    """What this build was made from: git's description of the checkout, else the version."""
    command = ["git", "describe", "--tags", "--always", "--dirty"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        described = ""
    return f"{version}+g{described}" if described else version


def find_program(name: str, module: str, folder_attribute: str) -> str | None:
    """A program on the PATH, else the one in the package of that name from PyPI."""
    on_path = shutil.which(name)
    if on_path:
        return on_path
    try:
        folder = getattr(__import__(module), folder_attribute)
    except (ImportError, AttributeError):
        return None
    return shutil.which(name, path=str(folder))


def find_cmake() -> str:
    """A CMake that is new enough."""
    cmake = find_program("cmake", "cmake", "CMAKE_BIN_DIR")
    if cmake is None:
        stop("CMake is missing. Use:  pip install cmake ninja")
    output = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+\.\d+)", output)
    if match is None or major_minor(match[1]) < CMAKE_MINIMUM:
        stop(f"{cmake} is {output.splitlines()[0]}; 3.18 or newer is needed. Use:  pip install cmake ninja")
    return cmake


def check_toolchain() -> None:
    """Ends the build with what to install where the compiler or Python's headers are missing."""
    compiler = os.environ.get("CXX", "").split()
    if not shutil.which(compiler[0] if compiler else "c++") and not (not compiler and shutil.which("g++")):
        stop(
            f"no C++ compiler ({compiler[0] if compiler else 'c++, g++'}) on the PATH. "
            "It needs C++20 (g++ 11, clang 14).\n"
            "Debian, Ubuntu:  apt-get install g++\n"
            "Fedora:          dnf install gcc-c++"
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        dotted = f"{sys.version_info.major}.{sys.version_info.minor}"
        stop(
            f"Python.h is not in {sysconfig.get_paths()['include']}.\n"
            f"Debian, Ubuntu:  apt-get install python{dotted}-dev\n"
            "Fedora:          dnf install python3-devel"
        )


@dataclass(frozen=True)
class CudaBuild:
    """What CMake has to know to build the GPU parts."""

    nvcc: Path
    architectures: str
    nccl_include_folder: Path
    nccl_library: Path
    extra_include_folders: list[Path]

    def cmake_arguments(self) -> list[str]:
        return [
            "-DHORON_CUDA=ON",
            f"-DCMAKE_CUDA_COMPILER={self.nvcc}",
            f"-DHORON_CUDA_ARCHITECTURES={self.architectures}",
            f"-DHORON_NCCL_INCLUDE_DIR={self.nccl_include_folder}",
            f"-DHORON_NCCL_LIBRARY={self.nccl_library}",
            f"-DHORON_CUDA_EXTRA_INCLUDE_DIRS={';'.join(map(str, self.extra_include_folders))}",
        ]


def find_cuda_build() -> CudaBuild | str:
    """How to build the GPU parts, or why they are left out."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    nvcc = find_nvcc()
    if nvcc is None:
        return "nvcc is not in CUDACXX, CUDA_HOME/bin, /usr/local/cuda/bin or PATH"
    toolkit = nvcc_version(nvcc)
    major = major_minor(torch.version.cuda)[0]
    if toolkit[0] != major:
        release = f"{toolkit[0]}.{toolkit[1]}"
        return f"{nvcc} is of CUDA {release}, and torch {torch.__version__} of CUDA {torch.version.cuda}"
    # Where the wheels of NVIDIA's libraries lie: torch loads NCCL from there.
    wheels = Path(torch.__file__).resolve().parents[1] / "nvidia"
    nccl_header, nccl_library = wheels / "nccl" / "include" / "nccl.h", wheels / "nccl" / "lib" / "libnccl.so.2"
    for path in (nccl_header, nccl_library):
        if not path.exists():
            return f"{path} does not exist; pip install nvidia-nccl-cu{major} in the version that torch asks for"
    complaint = nvcc_complaint(nvcc)
    if complaint:
        return (
            f"{nvcc} does not compile here: {complaint}\n"
            "CUDAHOSTCXX names another C++ compiler for it, CUDACXX another nvcc"
        )
    return CudaBuild(
        nvcc=nvcc,
        architectures=cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), toolkit),
        nccl_include_folder=nccl_header.parent,
        nccl_library=nccl_library,
        extra_include_folders=[path for path in [wheels / f"cu{major}" / "include"] if path.exists()],
    )


def cuda_build() -> CudaBuild | None:
    """As HORON_CUDA asks; says in one line what is not built, and why."""
    wanted = os.environ.get("HORON_CUDA", "auto").lower()
    if wanted not in ("auto", "0", "1", "off", "on"):
        stop(f"HORON_CUDA is '{wanted}'; expected auto, 0 or 1.")
    if wanted in ("0", "off"):
        print("horon is built without its GPU parts: HORON_CUDA asks for it.", flush=True)
        return None
    found = find_cuda_build()
    if isinstance(found, CudaBuild):
        return found
    if wanted in ("1", "on"):
        stop(f"HORON_CUDA asks for the GPU parts, but {found}.")
    print(f"horon is built without its GPU parts: {found}.", flush=True)
    return None


def find_nvcc() -> Path | None:
    """The first nvcc in the places that CMake and torch look at."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes if home), shutil.which("nvcc")]
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path:
            return Path(path)
    return None


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """(13, 0) of "Cuda compilation tools, release 13.0, V13.0.88"; (0, 0) if it does not say."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", output)
    return major_minor(match[1]) if match else (0, 0)


def nvcc_complaint(nvcc: Path) -> str:
    """The first error of a small program's compilation, with what CMake gives to nvcc; "" if there is none.

    Each nvcc knows compilers and C libraries up to some version.
    """
    host_compiler = os.environ.get("CUDAHOSTCXX")
    flags = [*([f"-ccbin={host_compiler}"] if host_compiler else []), *shlex.split(os.environ.get("CUDAFLAGS", ""))]
    with tempfile.TemporaryDirectory(prefix="horon-nvcc-") as folder:
        source = Path(folder, "kernel.cu")
        source.write_text("#include <cuda_runtime.h>\n#include <cmath>\n__global__ void nothing() {}\n")
        command = [str(nvcc), *flags, "-std=c++20", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return ""
    lines = (result.stderr + result.stdout).splitlines()
    errors = [line for line in lines if "error" in line.lower()] + lines
    return errors[0].strip() if errors else f"it ended with {result.returncode}"


def cuda_architectures(torch_list: str, toolkit: tuple[int, int]) -> str:
    """CMake's list for torch's ("8.0 9.0a;10.0+PTX"), or compute capability 8.0 to 10.0 and PTX."""
    if not torch_list:
        newest = ["90-real", "100"] if toolkit >= (12, 8) else ["90"]
        return ";".join(["80-real", "86-real", "89-real", *newest])
    architectures = []
    for entry in torch_list.replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            stop(f"TORCH_CUDA_ARCH_LIST has '{entry}'; expected numbers, say '8.0;9.0+PTX'.")
        number = match[1] + match[2] + match[3]
        architectures.append(number if match[4] else f"{number}-real")
    return ";".join(architectures)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Waits for another build in a folder. Two at once take each other's files of dependencies away, and then ninja
    compiles nothing anew when a header changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"horon: another build is at work in {folder}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildPackage(build_py):
    """Copies the package; what an earlier build left (a module that is gone since) does not get in."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "horon"), ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    """Runs CMake for horon._C, and writes horon/_build_info.py beside it."""

    def run(self) -> None:
        self.is_in_place = bool(self.inplace or self.editable_mode)  # setuptools clears the first meanwhile
        super().run()

    def build_extension(self, ext: Extension) -> None:
        version = torch_version()
        check_toolchain()
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = ROOT / build_folder() / "cmake"
        cuda = cuda_build()
        self.compile(folder, output.parent, cuda)
        self.write_build_info(output.parent / "_build_info.py", version, cuda)

    def compile(self, folder: Path, output_folder: Path, cuda: CudaBuild | None) -> None:
        import torch
        from torch.utils import cpp_extension  # torch was checked above

        cmake = find_cmake()
        ninja = find_program("ninja", "ninja", "BIN_DIR")
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{folder}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DHORON_TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}",
            f"-DHORON_TORCH_LIBRARY_DIR={cpp_extension.library_paths()[0]}",
            f"-DHORON_TORCH_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-DHORON_PYTHON_INCLUDE_DIR={sysconfig.get_paths()['include']}",
            f"-DHORON_PYTHON_EXT_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            f"-DHORON_EXTENSION_DIR={output_folder}",
            f"-DCMAKE_UNITY_BUILD={'ON' if self.is_unity() else 'OFF'}",
            f"-DCMAKE_UNITY_BUILD_BATCH_SIZE={UNITY_BATCH_SIZE}",
            *(cuda.cmake_arguments() if cuda else ["-DHORON_CUDA=OFF"]),
        ]
        generator = "Ninja" if ninja else "Unix Makefiles"
        configure += [f"-G{generator}"] + ([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else [])
        with alone_in(folder.parent):
            discard_foreign_cache(folder, generator)
            self.call(configure)
            self.call([cmake, "--build", str(folder), "--target", "_C", "--parallel", str(self.jobs())])

    def is_unity(self) -> bool:
        """Whether several files are compiled as one."""
        asked = os.environ.get("HORON_UNITY", "")
        if asked not in ("", "0", "1"):
            stop(f"HORON_UNITY is '{asked}'; expected 0 or 1.")
        return asked == "1" or (asked == "" and not self.is_in_place)

    def jobs(self) -> int:
        """MAX_JOBS as in torch's own builds, else the cores that this process may use."""
        return int(os.environ.get("MAX_JOBS", "0")) or len(os.sched_getaffinity(0))

    def call(self, command: list[str]) -> None:
        print(" ".join(command), flush=True)
        result = subprocess.run(command)
        if result.returncode != 0:
            stop(f"the command above this line failed with exit code {result.returncode}:\n{' '.join(command)}")

    def write_build_info(self, path: Path, version: str, cuda: CudaBuild | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            '"""What this build of horon was made for. Written by setup.py."""\n\n'
            f"TORCH_VERSION = {version!r}\n"
            f"PYTHON_TAG = {python_tag()!r}\n"
            f"BUILD_ID = {build_id(self.distribution.get_version())!r}\n"
            f"CUDA = {cuda is not None}\n"
        )

    def copy_extensions_to_source(self) -> None:
        """Editable installs: setuptools copies the extension into python/horon, and the build info goes with it."""
        super().copy_extensions_to_source()
        package_folder = self.get_finalized_command("build_py").get_package_dir("horon")
        self.copy_file(str(Path(self.build_lib, "horon", "_build_info.py")), package_folder)

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        return outputs + [str(Path(output).with_name("_build_info.py")) for output in outputs]


def discard_foreign_cache(folder: Path, generator: str) -> None:
    """Removes a CMake cache that CMake would refuse: another generator's, or one of a tree that was moved."""
    cache = folder / "CMakeCache.txt"
    if not cache.exists():
        return
    text = cache.read_text()
    same_tree = f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" in text
    if not same_tree or f"CMAKE_GENERATOR:INTERNAL={generator}\n" not in text:
        shutil.rmtree(folder)


setup(
    ext_modules=[Extension("horon._C", sources=[])],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPackage},
    options={"build": {"build_base": str(build_folder() / "package")}},
)
