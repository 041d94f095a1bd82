#!/bin/bash
# All that only a GPU can show, in one go and within a time limit: tests, then benchmarks, what matters most first.
#
#   benchmarks/gpu_machine.sh OUT [SECONDS]      # SECONDS: when to end (default 3000); what is not done by then is left out
#
# OUT gets a log for each step, junit.xml of the tests, gpu.json and gpu-results.md of benchmarks/gpu.py, and summary.txt.
# Where two ranks can not even add numbers, it ends at once.
# Variables: PYTHON (python3), JOBS (processes that run tests; needs pytest-xdist for more than 1), HORON_COMMIT (for the
# report, where there is no git), PACK_VARIANTS (a folder of gpu_pack_variants.py --build), STEPS (names of steps; all),
# TESTS (tests/gpu; files or test ids), TESTS_S (seconds for them), PYTEST_OPTIONS.
#
# For a machine that is lent for minutes: build horon elsewhere, for the same Python and torch, and bring it along on
# PYTHONPATH, with the variants of the pack kernel.
set -u
out=$(realpath -m "$1")
end=$((SECONDS + ${2:-3000}))
python=${PYTHON:-python3}
jobs=${JOBS:-1}
variants=${PACK_VARIANTS:-build/pack_variants}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
cp docs/gpu-results.md "$out/gpu-results.md"

# step NAME SECONDS COMMAND...: at most that long, and not past the end.
step() {
  local name=$1 limit=$2 left=$((end - SECONDS)) rc
  shift 2
  [[ -n ${STEPS:-} && " $STEPS " != *" $name "* ]] && return
  ((limit > left)) && limit=$left
  if ((limit < 5)); then
    echo "$name: left out, no time" | tee -a "$out/summary.txt"
    return
  fi
  local began=$SECONDS
  timeout --signal=INT --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1
  rc=$?
  echo "$name: exit $rc after $((SECONDS - began)) of $limit s" | tee -a "$out/summary.txt"
  tail -n "${TAIL:-3}" "$out/$name.log"
  return "$rc"
}

benchmark() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" benchmarks/gpu.py --json "$out/gpu.json" --output "$out/gpu-results.md" "$@"
}

tests() {
  step "$1" "$2" "$python" -m pytest -p no:cacheprovider --tb=long "${@:3}"
}

parallel=()
((jobs > 1)) && parallel=(-n "$jobs" --dist load)
export FAIL_WITHOUT_CUDA=1 HORON_GPU_TESTS_MAX_S=${HORON_GPU_TESTS_MAX_S:-60}

TAIL=8 step machine 60 "$python" -c '
import torch
from horon import _C
print(torch.__version__, torch.cuda.get_device_properties(0), torch.cuda.nccl.version(), "GPU parts:", _C.has_gpu_parts())'
TAIL=60 tests smoke 60 -x 'tests/gpu/test_gpu_reductions.py::test_all_reduce[1-sync]' \
  'tests/gpu/test_gpu_reductions.py::test_all_reduce[2-sync]' || exit 1
[[ -d $variants ]] && TAIL=40 step pack_variants 60 "$python" benchmarks/gpu_pack_variants.py --run "$variants" --json "$out/pack_variants.json"
# shellcheck disable=SC2086  # words on purpose
TAIL=60 tests tests "${TESTS_S:-420}" -v --durations=15 ${PYTEST_OPTIONS:-} "${parallel[@]}" --junitxml "$out/junit.xml" ${TESTS:-tests/gpu}
benchmark pack 60 --parts pack
benchmark operations-1 150 --parts operations --ranks 1
benchmark operations-2 200 --parts operations --ranks 2
benchmark training 200 --parts training
benchmark fit-cost 100 --fit-cost
cat "$out/summary.txt"
