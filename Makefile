# Everything a fresh machine needs: `make demo` and `make test`. PYTHON chooses the interpreter, OUT the demo's folder.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= .
DEMO ?=
# What `conformance` and `conformance-gpu` run: which backend; smoke, full or soak; all of it or a part, such as 2/8;
# other options, such as CONFORMANCE="--op gemm --resume".
BACKEND ?=
LEVEL ?= smoke
SHARD ?= 1/1
CONFORMANCE ?=
certify = conformance --backend $(or $(BACKEND),$(1)) --level $(LEVEL) --shard $(SHARD) \
	--out $(OUT)/te_dispatch_conformance $(CONFORMANCE)
# Backends that every machine can use; those for hardware are added where they can be built. The Triton backend's
# kernels are compiled when they are called: without a GPU they are interpreted (TRITON_INTERPRET=1), and compiled for
# chips that are not here (`make crosscompile`).
PORTABLE = -e ./backends/reference -e ./backends/torch -e ./backends/triton
# Executes the Triton backend's code for AMD's chips in tests (docs/rocm.md).
EMULATOR = -e ./tools/gfx_emulator
STAMP = $(VENV)/.installed
# Frameworks that import Transformer Engine by name have an environment of their own, for their many dependencies.
VENV_INTEGRATIONS ?= .venv-integrations
STAMP_INTEGRATIONS = $(VENV_INTEGRATIONS)/.installed

# The CUDA backend is built where nvcc is found (`make test-all`) or a GPU is (`make demo`, for that GPU's chip alone), and
# anywhere on demand (`make cuda`), with PyPI's compiler where the machine has none. `COMPILER_CACHE=sccache` keeps what is
# compiled in sccache's own folder (SCCACHE_DIR), for a later checkout in the same place.
CUDA = backends/cuda
COMPILER_CACHE ?=
compiler_cache = $(if $(COMPILER_CACHE),$(foreach language,CUDA CXX,CMAKE_$(language)_COMPILER_LAUNCHER=$(CURDIR)/$(BIN)/sccache))
ARCHS ?=
ALL_ARCHS = 80,89,90a,100a
NVCC := $(shell $(PYTHON) $(CUDA)/cmake/toolkit.py 2>/dev/null)
BUILT := $(wildcard $(VENV)/.cuda-*)
PRESENT := $(shell $(PYTHON) $(CUDA)/tools/present_archs.py 2>/dev/null)
CUDA_SOURCES := $(shell find $(CUDA)/csrc $(CUDA)/cmake -type f -not -name '*.pyc') $(CUDA)/CMakeLists.txt $(CUDA)/pyproject.toml
cuda_stamp = $(VENV)/.cuda-$(or $(ARCHS),$(1))
# The backend for AMD GPUs needs a C++ compiler alone (`make rocm`); an installed ROCm is found as it finds it.
ROCM = backends/rocm
ROCM_SOURCES := $(shell find $(ROCM)/csrc -type f) $(ROCM)/CMakeLists.txt $(ROCM)/pyproject.toml
rocm_stamp = $(VENV)/.rocm
HAS_ROCM := $(or $(ROCM_PATH),$(wildcard /opt/rocm))
NO_NVCC = @echo "no nvcc: backends/cuda is left out, and so are its tests of the build (make cuda builds it all the same)"

.PHONY: demo test test-all test-integrations test-kit cuda rocm amd-packages conformance conformance-rocm-host \
	conformance-emulated crosscompile lint format types check bench test-gpu sanitize conformance-gpu certify-amd \
	bench-gpu clean

demo: $(STAMP) $(if $(PRESENT),$(call cuda_stamp,$(PRESENT))) $(if $(HAS_ROCM),$(rocm_stamp))
	$(BIN)/te-dispatch demo --out $(OUT) $(DEMO)

# Needs no GPU and uses none: where one is visible, modules would be made on it, and these tests' data are on the CPU.
on_cpu = CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 -q

# The tests that take minutes in all, or those that TESTS names.
test: $(STAMP)
	$(on_cpu) $(or $(TESTS),--part quick)

# All of them, with those of the CUDA backend's build where there is nvcc and of the ROCm backend where there is a C++
# compiler; with PART=rest those that `make test` leaves, with SLICE=2/3 the second third of those.
PART ?=
SLICE ?=
test-all: $(STAMP) $(if $(NVCC),$(call cuda_stamp,$(ALL_ARCHS))) $(if $(shell command -v c++),$(rocm_stamp))
	$(if $(NVCC)$(BUILT),,$(NO_NVCC))
	$(on_cpu) $(if $(PART),--part $(PART)) $(if $(SLICE),--slice $(SLICE))

# accelerate, transformers, Lightning, Megatron Core, peft, DDP and FSDP, unmodified, on te_dispatch (docs/integrations.md).
# Then the plugin for Transformer Engine beside its own Python, which must not be where the frameworks would find it.
test-integrations: $(STAMP_INTEGRATIONS) $(STAMP)
	$(VENV_INTEGRATIONS)/bin/python -m pytest -n 2 -q $(or $(TESTS),tests/integrations)
	$(if $(TESTS),,PYTHONPATH=$(VENV_INTEGRATIONS)/transformer_engine $(BIN)/python -m pytest -q \
		tests/compat/test_nvte_plugin_wheel.py)

$(STAMP_INTEGRATIONS): tests/integrations/requirements.txt pyproject.toml \
		backends/reference/pyproject.toml backends/torch/pyproject.toml
	$(PYTHON) -m venv $(VENV_INTEGRATIONS)
	$(VENV_INTEGRATIONS)/bin/python -m pip install --upgrade pip
	$(VENV_INTEGRATIONS)/bin/python -m pip install -e ".[test]" -e ./backends/reference -e ./backends/torch \
		-r tests/integrations/requirements.txt
	$(VENV_INTEGRATIONS)/bin/python -m pip install --no-deps --target $(VENV_INTEGRATIONS)/transformer_engine \
		transformer_engine==2.20.2 einops
	touch $@

cuda: $(call cuda_stamp,$(ALL_ARCHS))

rocm: $(rocm_stamp)

# AMD's own headers and libraries, for tests that compare with them (docs/rocm.md). The system is left as it is. What
# cannot be had is said here, and by the tests that are skipped without it.
amd-packages: $(STAMP)
	$(PYTHON) $(ROCM)/tools/amd_packages.py libraries || $(PYTHON) $(ROCM)/tools/amd_packages.py headers || test $$? = 75
	$(BIN)/python -m pip install "hip-python[libraries]" || echo "skipped: unavailable: hip-python"

# The reference is what the others are compared with; itself, it answers to its own tests.
conformance: $(STAMP)
	$(BIN)/te-dispatch $(call certify,torch)

# The kit on the backend for AMD GPUs and a library that stands for the chip on the CPU (docs/rocm.md): CHIP=gfx950.
CHIP ?= gfx942
conformance-rocm-host: $(rocm_stamp)
	$(BIN)/python $(ROCM)/tools/host_conformance.py $(CHIP) --level $(LEVEL) --shard $(SHARD) \
		--out $(OUT)/te_dispatch_conformance_$(CHIP) $(CONFORMANCE)

# The Triton backend's kernels for an AMD chip, whose machine code is executed on the CPU (docs/rocm.md): CHIP=gfx950, or
# a part of the units, SHARD=2/8.
conformance-emulated: $(STAMP)
	$(BIN)/te-dispatch $(call certify,triton) --device emulated:$(CHIP) --limit 300

$(STAMP): pyproject.toml backends/reference/pyproject.toml backends/torch/pyproject.toml backends/triton/pyproject.toml \
		tools/gfx_emulator/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e ".[dev]" $(PORTABLE) $(EMULATOR)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --no-deps "triton>=3.6" || \
		echo "no triton for this machine: backends/triton is unavailable"
	touch $(STAMP)

# Not isolated: the build folder then stays good, and a change to one kernel compiles that one.
$(VENV)/.cuda-%: $(STAMP) $(CUDA_SOURCES)
	$(BIN)/python -m pip install "scikit-build-core>=0.10" "pybind11>=2.12" "cmake>=3.24" ninja \
		$(if $(NVCC),,`$(PYTHON) $(CUDA)/cmake/toolkit.py --packages`) $(COMPILER_CACHE)
	$(BIN)/python -m pip install --no-deps "nvidia-cudnn-frontend>=1.14"  # what it asks for beside is for its own kernels
	TE_DISPATCH_CUDA_ARCHS=$* $(compiler_cache) $(BIN)/python -m pip install -v --no-deps --no-build-isolation -e $(CUDA)
	rm -f $(VENV)/.cuda-*
	touch $@

$(rocm_stamp): $(STAMP) $(ROCM_SOURCES)
	$(BIN)/python -m pip install "scikit-build-core>=0.10" "pybind11>=2.12" "cmake>=3.24" ninja
	$(BIN)/python -m pip install -v --no-deps --no-build-isolation -e $(ROCM)
	touch $@

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

# Every Triton kernel for NVIDIA's and AMD's chips, as a table; TARGETS="sm_90 gfx942" for some, CROSSCOMPILE for other
# options, such as "--record". No GPU is needed.
TARGETS ?=
CROSSCOMPILE ?=
crosscompile: $(STAMP)
	$(BIN)/python -m te_dispatch_triton.crosscompile $(if $(TARGETS),--targets $(TARGETS)) $(CROSSCOMPILE)

bench: $(STAMP)
	$(BIN)/python benchmarks/argument_checks.py
	$(BIN)/python benchmarks/dispatch_overhead.py
	$(BIN)/python benchmarks/python_frames.py

# On a GPU machine: the interpreter at hand, with its own torch and build tools, and no package index. Entry points are
# made by installing into a folder without dependencies or build isolation.
GPU_SITE ?= /tmp/te_dispatch_site
GPU_PYTHON = PYTHONPATH=$(GPU_SITE):$(PYTHONPATH) $(PYTHON)

$(GPU_SITE)/.installed: $(CUDA_SOURCES) $(ROCM_SOURCES) \
		$(shell find te_dispatch backends \( -name '*.py' -o -name '*.json' \) -not -path '*/build/*') pyproject.toml
	$(if $(NVCC),,$(NO_NVCC))
	TE_DISPATCH_CUDA_ARCHS=$(or $(ARCHS),$(PRESENT),$(ALL_ARCHS)) $(PYTHON) -m pip install -q --no-deps --no-index \
		--no-build-isolation --no-compile --upgrade --target $(GPU_SITE) \
		. ./backends/reference ./backends/torch ./backends/triton $(if $(NVCC),./$(CUDA)) $(if $(HAS_ROCM),./$(ROCM))
	touch $@

test-gpu: $(GPU_SITE)/.installed
	$(GPU_PYTHON) -m pytest -q -p no:cacheprovider $(or $(TESTS),tests/gpu)

# The conformance kit on wrong and on legal implementations, at every level. `make test-all` leaves level
# full of the legal ones out, and runs a quarter of their units at smoke.
test-kit: $(STAMP)
	TE_DISPATCH_TEST_KIT=1 $(BIN)/python -m pytest -n 2 -q tests/conformance/test_faults.py tests/conformance/test_variations.py

# compute-sanitizer over the CUDA backend's conformance units; SANITIZE="--tool memcheck --resume" for other options.
SANITIZE ?=
sanitize: $(GPU_SITE)/.installed
	$(GPU_PYTHON) $(CUDA)/tools/sanitize.py $(SANITIZE)

conformance-gpu: $(GPU_SITE)/.installed
	$(GPU_PYTHON) -m te_dispatch.cli $(call certify,$(if $(NVCC),cuda,$(if $(HAS_ROCM),rocm,torch)))

# On a machine with AMD GPUs and PyTorch for ROCm: what is there, then the kit at level full on every backend that serves
# the chip, in an environment that sees this Python's packages. The page tells chip, driver and library versions.
# Interrupted, it goes on where it was (docs/rocm.md).
VENV_AMD ?= .venv-amd
CERTIFICATE_AMD = $(OUT)/te_dispatch_certificate_amd
certify-amd:
	$(PYTHON) -m venv --system-site-packages $(VENV_AMD)
	$(VENV_AMD)/bin/python -m pip install ".[conformance]" ./backends/reference ./backends/torch ./backends/triton ./$(ROCM)
	-$(VENV_AMD)/bin/te-dispatch doctor
	$(VENV_AMD)/bin/te-dispatch conformance $(foreach one,$(or $(BACKEND),rocm triton torch),--backend $(one)) \
		--level $(if $(filter file,$(origin LEVEL)),full,$(LEVEL)) --out $(CERTIFICATE_AMD) \
		$(if $(wildcard $(CERTIFICATE_AMD)/journal.jsonl),--resume) $(CONFORMANCE)

# TE: a folder with Transformer Engine to compare with; OPS, LAYER: options of benchmarks/ops.py and layer.py.
bench-gpu: $(GPU_SITE)/.installed
	$(GPU_PYTHON) benchmarks/argument_checks.py
	$(GPU_PYTHON) benchmarks/dispatch_overhead.py
	$(GPU_PYTHON) benchmarks/python_frames.py
	$(GPU_PYTHON) benchmarks/ops.py $(if $(TE),--te $(TE)) $(OPS)
	$(GPU_PYTHON) benchmarks/layer.py $(if $(TE),--te $(TE)) $(LAYER)

clean:
	rm -rf $(VENV) $(VENV_INTEGRATIONS) $(VENV_AMD) build dist *.egg-info backends/*/*.egg-info backends/*/build
