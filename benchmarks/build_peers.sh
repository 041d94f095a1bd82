#!/bin/sh
# Builds what horon is compared with into a virtual environment of its own: mpi4py on the system's Open MPI, Horovod
# 0.28.1 (on Gloo) and DeepSpeed 0.17.6's shared-memory all-reduce, all on torch 2.13.0 for CPUs, the last version that
# this Horovod builds on.
#
#   benchmarks/build_peers.sh [VENV]     default .venv-peers, where the benchmarks look; about 15 minutes on 2 cores
#
# Needs: a C++ compiler, Python 3.10 to 3.13 (PYTHON=python3) with headers, and Open MPI
# (Debian, Ubuntu: apt-get install openmpi-bin libopenmpi-dev). A peer that does not build is named at the end; the
# others work without it. PEERS="mpi4py deepspeed" builds only those named.
set -eu

venv=${1:-.venv-peers}
peers=${PEERS:-mpi4py deepspeed horovod}
python=${PYTHON:-python3}
torch=${TORCH_SPEC:-torch==2.13.0}
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
failed=""

"$python" -m venv "$venv"
bin=$(cd "$venv/bin" && pwd)
PATH="$bin:$PATH"
export PATH
# setuptools 80 and newer lack what Horovod's setup.py calls.
pip --disable-pip-version-check install -q "setuptools<80" wheel packaging cloudpickle psutil pyyaml cffi pycparser \
  "cmake==3.25.*" ninja numpy
# torch without the gigabytes of CUDA that PyPI's build depends on; its other dependencies come from PyPI.
pip --disable-pip-version-check install -q --no-deps --retries 1 --extra-index-url "$index" "$torch"
pip --disable-pip-version-check install -q filelock fsspec jinja2 networkx sympy typing-extensions

build_mpi4py() {
  if ! command -v mpicc >/dev/null; then
    echo "mpi4py: no mpicc. Debian, Ubuntu: apt-get install openmpi-bin libopenmpi-dev" >&2
    return 1
  fi
  pip --disable-pip-version-check install -q --no-binary mpi4py mpi4py
}

# Its other parts (and their many dependencies) are not needed: only the source of one operation, which is compiled
# here, so that the benchmark does not spend its time on it.
build_deepspeed() {
  pip --disable-pip-version-check install -q hjson msgpack py-cpuinfo pydantic tqdm einops &&
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip --disable-pip-version-check install -q --no-build-isolation --no-deps \
      deepspeed==0.17.6 &&
    DS_ACCELERATOR=cpu python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()'
}

# torch 2.13 needs C++20; the release asks for C++14.
build_horovod() {
  folder=$(mktemp -d) || return 1
  pip --disable-pip-version-check download -q --no-build-isolation --no-deps --no-binary horovod -d "$folder" \
    horovod==0.28.1 && tar -xzf "$folder/horovod-0.28.1.tar.gz" -C "$folder" || return 1
  (
    cd "$folder/horovod-0.28.1" &&
      sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt &&
      HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_MPI=1 pip --disable-pip-version-check install --no-build-isolation --no-deps .
  ) && python -c 'import horovod.torch'
}

for peer in $peers; do
  echo "== $peer"
  "build_$peer" || failed="$failed $peer"
done
if [ -n "$failed" ]; then
  echo "not built:$failed" >&2
  exit 1
fi
echo "built in $venv: $peers"
