# Everything a fresh machine needs: `make demo` and `make test`. PYTHON chooses the interpreter, OUT the demo's folder.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= .
DEMO ?=
# What `conformance` and `conformance-gpu` run: smoke, full or soak; all of it or a part, such as 2/8; other options,
# such as CONFORMANCE="--op gemm --resume".
LEVEL ?= smoke
SHARD ?= 1/1
CONFORMANCE ?=
CERTIFY = conformance --backend torch --level $(LEVEL) --shard $(SHARD) --out $(OUT)/te_dispatch_conformance $(CONFORMANCE)
# Backends that every machine can use; those for hardware are added where the hardware is.
PORTABLE = -e ./backends/reference -e ./backends/torch
STAMP = $(VENV)/.installed

.PHONY: demo test conformance lint format types check bench test-gpu conformance-gpu bench-gpu clean

demo: $(STAMP)
	$(BIN)/te-dispatch demo --out $(OUT) $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -q $(TESTS)

# The reference is what the others are compared with; itself, it answers to its own tests.
conformance: $(STAMP)
	$(BIN)/te-dispatch $(CERTIFY)

$(STAMP): pyproject.toml backends/reference/pyproject.toml backends/torch/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e ".[dev]" $(PORTABLE)
	touch $(STAMP)

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/argument_checks.py
	$(BIN)/python benchmarks/dispatch_overhead.py

# On a GPU machine: the interpreter at hand, with its own torch, and no package index. Entry points are made by
# installing into a folder without dependencies or build isolation.
GPU_SITE ?= /tmp/te_dispatch_site

$(GPU_SITE)/.installed:
	$(PYTHON) -m pip install -q --no-deps --no-index --no-build-isolation --no-compile --upgrade --target $(GPU_SITE) \
		. ./backends/reference ./backends/torch
	touch $@

test-gpu: $(GPU_SITE)/.installed
	PYTHONPATH=$(GPU_SITE):$(PYTHONPATH) $(PYTHON) -m pytest -q -p no:cacheprovider $(or $(TESTS),tests/gpu)

conformance-gpu: $(GPU_SITE)/.installed
	PYTHONPATH=$(GPU_SITE):$(PYTHONPATH) $(PYTHON) -m te_dispatch.cli $(CERTIFY)

bench-gpu: $(GPU_SITE)/.installed
	PYTHONPATH=$(GPU_SITE):$(PYTHONPATH) $(PYTHON) benchmarks/argument_checks.py
	PYTHONPATH=$(GPU_SITE):$(PYTHONPATH) $(PYTHON) benchmarks/dispatch_overhead.py

clean:
	rm -rf $(VENV) build dist *.egg-info backends/*/*.egg-info backends/*/build
