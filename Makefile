# make demo    train the demo with 2 processes              make test    C++ and Python tests
# make tsan    engine tests under the thread sanitizer      make asan    under address + undefined
# make test-gpu  what needs a GPU (FAIL_WITHOUT_CUDA=1: fails where there is none)
# make lint    clang-format, clang-tidy, ruff, mypy         make bench   benchmarks/allreduce.py
# make venv    only the virtual environment                 make build   the package, in it
# make clean   removes build/ and $(VENV)
#
# The first call creates $(VENV), installs what is needed into it and builds; later ones do what has changed.
# Another torch, beside the first:  make test VENV=.venv-2.13 TORCH_SPEC=torch==2.13.0

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch>=2.11,<2.16
PIP_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?= --against gloo,fake,memcpy
PYTEST_ARGS ?=
CTEST_ARGS ?=
CLANG_FORMAT ?= $(BIN)/clang-format
CLANG_TIDY ?= $(BIN)/clang-tidy
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Compiles a dozen files at a time, which takes half as long from nothing. With 0 a change of one file takes less.
export HORON_UNITY ?= 1

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Of torch's thousands of Python files, the few that are imported are compiled, when they are; and then kept, or each process
# that a test starts would do it again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --no-compile $(PIP_ARGS)
STAMPS := $(VENV)/.stamps
PYTHON_DEPENDENCIES := setuptools wheel cmake ninja numpy scikit-learn tqdm cloudpickle
TEST_DEPENDENCIES := pytest expecttest psutil
# The clang tools say other things in each version, and from 22 on they are several times faster on torch's headers.
LINT_DEPENDENCIES := ruff mypy clang-format==23.1.4 clang-tidy==23.1.4
BENCH_DEPENDENCIES := matplotlib

CXX_FILES = $(shell find csrc torch_backend tests/cpp tests/cuda_simulator benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu')
SOURCES := setup.py pyproject.toml CMakeLists.txt \
  $(shell find csrc torch_backend cmake -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name CMakeLists.txt -o -name '*.cmake') \
  $(shell find python/horon -name '*.py' -o -name '*.pyi' | grep -v _build_info)
# Folders change when files come and go, which file lists alone would not show.
SOURCES += $(shell find csrc torch_backend python/horon -type d -not -name __pycache__)

# CMake options of the builds of the engine's tests, and of each of them.
TESTS_OPTIONS := -DHORON_BUILD_TESTS=ON -DCMAKE_UNITY_BUILD=$(if $(filter 1,$(HORON_UNITY)),ON,OFF) -DCMAKE_UNITY_BUILD_BATCH_SIZE=12
tests_OPTIONS :=
tsan_OPTIONS := -DHORON_SANITIZE=thread
asan_OPTIONS := -DHORON_SANITIZE=address,undefined

.PHONY: demo test test-main test-cpp test-python test-gpu test-gpu-build tsan asan lint bench venv build clean prerequisites FORCE
.DELETE_ON_ERROR:

demo: $(STAMPS)/horon
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/digits_ddp.py $(DEMO_ARGS)

# Both suites run, and print their summary, even if the first fails.
test: $(STAMPS)/horon $(STAMPS)/test build-tests
	@status=0; \
	$(MAKE) --no-print-directory run-ctest SUITE=tests || status=1; \
	$(BIN)/python -m pytest tests/python $(PYTEST_ARGS) || status=1; \
	exit $$status

# What a second version of torch is tested with: all but what is long and has little to do with torch.
test-main: $(STAMPS)/horon $(STAMPS)/test
	$(BIN)/python -m pytest tests/python -m "not slow and not torch_suite and not any_torch" $(PYTEST_ARGS)

test-python: $(STAMPS)/horon $(STAMPS)/test
	$(BIN)/python -m pytest tests/python $(PYTEST_ARGS)

# Skipped where there is no GPU; failing instead with FAIL_WITHOUT_CUDA=1. HORON_SLOW=1 adds what needs much memory.
test-gpu: $(STAMPS)/horon $(STAMPS)/test
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

# Builds, links and imports the GPU parts; an error where they can not be built. For a second version of torch.
test-gpu-build:
	HORON_CUDA=1 $(MAKE) --no-print-directory $(STAMPS)/horon
	cd build && $(BIN)/python -c 'import torch, horon._C as extension; \
	  assert extension.has_gpu_parts(); print("GPU parts of horon for torch", torch.__version__, "load")'

test-cpp: build-tests
	@$(MAKE) --no-print-directory run-ctest SUITE=tests

tsan asan: %: build-%
	@$(MAKE) --no-print-directory run-ctest SUITE=$@

bench: $(STAMPS)/horon $(STAMPS)/bench
	$(BIN)/python benchmarks/allreduce.py --ranks 2 $(BENCH_ARGS)

lint: $(STAMPS)/horon $(STAMPS)/lint build-tests
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	CLANG_TIDY="$(CLANG_TIDY)" JOBS="$(JOBS)" $(BIN)/python scripts/clang_tidy.py

venv: $(STAMPS)/dependencies

build: $(STAMPS)/horon

clean:
	rm -rf build $(VENV) python/horon.egg-info python/horon/_build_info.py python/horon/_C.*.so

prerequisites:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/check_prerequisites.sh build catch2

# --- the engine's tests: build/tests, build/tsan, build/asan ---

.PHONY: build-tests build-tsan build-asan run-ctest
build-tests build-tsan build-asan: build-%: $(STAMPS)/dependencies
	@PYTHON="$(BIN)/python" sh scripts/check_prerequisites.sh catch2
	PATH="$(BIN):$$PATH" cmake -S . -B build/$* $(if $(wildcard build/$*/CMakeCache.txt),,-G Ninja) \
	  $(TESTS_OPTIONS) $($*_OPTIONS)
	PATH="$(BIN):$$PATH" cmake --build build/$* --parallel $(JOBS)

run-ctest:
	cd build/$(SUITE) && PATH="$(BIN):$$PATH" ctest --output-on-failure --parallel $(JOBS) $(CTEST_ARGS)

# --- the virtual environment ---

# Holds the torch that was asked for, so that another TORCH_SPEC installs again.
$(STAMPS)/torch-spec: FORCE
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/check_prerequisites.sh build
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@echo '$(TORCH_SPEC)' | cmp -s - $@ || echo '$(TORCH_SPEC)' > $@

$(STAMPS)/dependencies: $(STAMPS)/torch-spec
	$(INSTALL) '$(TORCH_SPEC)' $(foreach package,$(PYTHON_DEPENDENCIES),'$(package)')
	@touch $@

$(STAMPS)/test: $(STAMPS)/dependencies
	$(INSTALL) $(TEST_DEPENDENCIES)
	@touch $@

$(STAMPS)/lint: $(STAMPS)/dependencies
	$(INSTALL) $(LINT_DEPENDENCIES)
	@touch $@

$(STAMPS)/bench: $(STAMPS)/dependencies
	$(INSTALL) $(BENCH_DEPENDENCIES)
	@touch $@

$(STAMPS)/horon: $(STAMPS)/dependencies $(SOURCES)
	PATH="$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps --force-reinstall .
	@touch $@
