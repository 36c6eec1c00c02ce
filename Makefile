# SPDX-License-Identifier: Apache-2.0
# Owns the set-up of a checkout: everything lands in .venv, target, build and dist, nothing outside.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test test-rust test-python test-vllm lint wheel sdist develop bench-core clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# The glibc that torch's wheels are made for.
GLIBC ?= 2.28

# One interpreter for every cargo call, so that switching between them compiles nothing again.
export PYO3_PYTHON := $(abspath $(BIN)/python)
export CARGO_TERM_PROGRESS_WHEN := never

BUILD_SOURCES := pyproject.toml Cargo.toml Cargo.lock .cargo/config.toml \
  $(wildcard build_backend/*.py)
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml)
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)
CUDA_SOURCES := $(shell find cuda -type f -not -path '*/__pycache__/*')
SOURCES := $(BUILD_SOURCES) $(RUST_SOURCES) $(PYTHON_SOURCES)

help:
	@echo 'make demo        run hotpage demo (no GPU, no CUDA compiler)'
	@echo 'make test        every check that needs no GPU, on the wheel that make wheel builds'
	@echo 'make test-vllm   the adapter inside vLLM $(VLLM_VERSION), and that version'"'"'s own tests'
	@echo 'make lint        ruff on the Python code'
	@echo 'make wheel       dist/*.whl with the kernels, its platform tag checked'
	@echo 'make sdist       dist/*.tar.gz'
	@echo 'make bench-core  scheduler latency as a table and in build/bench-core.json'
	@echo 'make develop     install the checkout itself (editable), with the kernels'
	@echo 'make clean       remove everything that make made'

$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'hotpage: error: Python 3.11 or later is needed; set PYTHON=python3.11, say' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'hotpage: error: this Python makes no environments; apt-get install python3-venv' >&2; exit 2; }
	@command -v cargo >/dev/null || \
	  { echo 'hotpage: error: no cargo was found; install Rust 1.85 or later with rustup' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=24'
	touch $@

# What a build needs, in the environment itself: an isolated build would compile pyo3 every time.
$(VENV)/stamp-light-tools: $(VENV)/stamp-venv pyproject.toml
	HOTPAGE_CUDA=0 HOTPAGE_GLIBC= $(BIN)/python build_backend/hotpage_build.py > $(VENV)/tools.txt
	$(PIP) install -r $(VENV)/tools.txt
	touch $@

$(VENV)/stamp-tools: $(VENV)/stamp-venv pyproject.toml cuda/toolkit.py build_backend/hotpage_build.py
	HOTPAGE_CUDA=1 HOTPAGE_GLIBC=$(GLIBC) $(BIN)/python build_backend/hotpage_build.py \
	  > $(VENV)/tools.txt
	$(PIP) install -r $(VENV)/tools.txt auditwheel
	touch $@

dist/stamp-wheel: $(VENV)/stamp-tools $(SOURCES) $(CUDA_SOURCES)
	rm -f dist/*.whl
	HOTPAGE_CUDA=1 HOTPAGE_GLIBC=$(GLIBC) $(PIP) wheel --no-build-isolation --no-deps -w dist .
	$(BIN)/python build_backend/check_wheel.py dist/*.whl
	touch $@

# Either build installs the command; the full one also satisfies what needs the light one.
$(VENV)/stamp-installed: $(VENV)/stamp-light-tools $(SOURCES)
	HOTPAGE_CUDA=0 HOTPAGE_GLIBC= $(PIP) install --no-build-isolation .
	touch $@

$(VENV)/stamp-full: dist/stamp-wheel
	$(PIP) install --force-reinstall --no-deps dist/*.whl
	$(PIP) install "$$(ls dist/*.whl)[test]"
	touch $(VENV)/stamp-light-tools $(VENV)/stamp-installed $@

demo: $(VENV)/stamp-installed
	$(BIN)/hotpage demo

test: test-rust test-python

test-rust: $(VENV)/stamp-venv
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo test --workspace --locked

test-python: $(VENV)/stamp-full
	$(BIN)/python -m pytest -m 'not gpu' --ignore tests/vllm tests

# vLLM brings its own torch, so the adapter is tested in an environment of its own.
VLLM_VERSION := 0.33.0
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check -q
VLLM_SOURCE := $(VLLM_VENV)/vllm-$(VLLM_VERSION)

$(VLLM_VENV)/stamp-vllm: $(VENV)/stamp-venv
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --upgrade 'pip>=24'
	$(VLLM_PIP) install vllm==$(VLLM_VERSION) pytest tblib setuptools-scm setuptools-rust
	$(VLLM_PIP) freeze > $(VLLM_VENV)/freeze.txt
	touch $@

# The wheel ships no tests. Only the archive is wanted, but pip asks its setup.py for metadata
# first, which needs torch and the setuptools plugins and builds nothing for the target `empty`.
$(VLLM_SOURCE)/stamp: $(VLLM_VENV)/stamp-vllm
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) $(VLLM_PIP) download \
	  --no-deps --no-build-isolation --no-binary vllm -d $(VLLM_VENV) vllm==$(VLLM_VERSION)
	tar -xzf $(VLLM_SOURCE).tar.gz -C $(VLLM_VENV) \
	  vllm-$(VLLM_VERSION)/tests vllm-$(VLLM_VERSION)/pyproject.toml
	touch $@

$(VLLM_VENV)/stamp-hotpage: $(VLLM_VENV)/stamp-vllm dist/stamp-wheel
	$(VLLM_PIP) install --force-reinstall --no-deps dist/*.whl
	$(VLLM_PIP) install "$$(ls dist/*.whl)"
	touch $@

test-vllm: $(VLLM_SOURCE)/stamp $(VLLM_VENV)/stamp-hotpage
	$(VLLM_BIN)/python tests/vllm/run_suite.py $(VLLM_SOURCE)

# Another version formats otherwise.
RUFF_VERSION := 0.17.6

lint: $(VENV)/stamp-venv
	$(PIP) install ruff==$(RUFF_VERSION)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench-core:
	cargo run --release --locked -q -p hotpage-benches --bin bench-core -- build/bench-core.json

wheel: dist/stamp-wheel
	@ls dist/*.whl

sdist: $(VENV)/stamp-light-tools
	mkdir -p dist
	rm -f dist/*.tar.gz
	cd build_backend && ../$(BIN)/python -c \
	  'import os, hotpage_build; os.chdir(".."); hotpage_build.build_sdist("dist")'
	@ls dist/*.tar.gz

develop: $(VENV)/stamp-tools
	HOTPAGE_CUDA=1 $(PIP) install --no-build-isolation -e '.[test]'
	rm -f $(VENV)/stamp-full $(VENV)/stamp-installed

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist target python/hotpage/lib python/hotpage/_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
