# `make demo` and `make test` work on a bare machine: each makes .venv itself. `make help` lists the rest.
#
#   PYTHON        the Python to build .venv with                (python3)
#   TORCH         torch, as a pip requirement                   (torch==2.13.0)
#   TORCH_INDEX   extra package index for torch; https://download.pytorch.org/whl/cpu has CPU-only wheels
#   REUSE_TORCH   1: do not install torch, see the one that PYTHON has
#   EXTRAS        more of halma's extras, with commas: cuda,triton
#   VENV          where the environment goes                    (.venv)

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
REUSE_TORCH ?=
EXTRAS ?=
VENV ?= .venv

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input
PINS := $(VENV)/pins.txt
BASE := $(VENV)/.halma-base
DEV := $(VENV)/.halma-dev
export PYTHONPATH :=

.PHONY: help demo test lint row nightly mutants bench gpu clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     install what is needed and let tiny-v4 write some text on the CPU"
	@echo "make test     lint, then the rows of tests that a pull request must pass"
	@echo "make lint     ruff, pyright, import-linter, and whether what is written from ci/matrix.toml and docs/results is up to date"
	@echo "make row ROW=ID   one row of ci/matrix.toml"
	@echo "make nightly  the slow rows"
	@echo "make mutants  take each guard away and see its test go red: make mutants MUTANTS='--only G12 --output FILE.md'"
	@echo "make bench    benchmarks on the CPU"
	@echo "make gpu      what an accelerator must show, and one table of it: make gpu GPU='--jobs 3 --only capture,verify-on'"
	@echo "make clean    remove .venv and caches"

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "halma needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# torch is pinned by TORCH alone, so that another one can be asked for.
$(PINS): constraints.txt | $(VENV)/bin/python
	grep -v '^torch==' constraints.txt >$@

$(BASE): pyproject.toml Makefile $(PINS)
	@echo "installing halma into $(VENV)"
	$(PIP) install -c $(PINS) setuptools
ifeq ($(REUSE_TORCH),1)
	$(PYTHON) ci/reuse_torch.py $(BIN)/python
else
	$(PIP) install -c $(PINS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
endif
	$(PIP) install -c $(PINS) --no-build-isolation -e .
	@touch $@

$(DEV): $(BASE)
	@echo "installing the tests' tools into $(VENV)"
	$(PIP) install -c $(PINS) --no-build-isolation -e '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	@touch $@

demo: $(BASE)
	$(BIN)/halma generate --model tiny-v4 --backend cpu --prompt "The President" --max-tokens 96 --table

test: lint
	$(BIN)/python -m ci.local --tier pr

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m ci.render --check
	$(BIN)/python -m ci.features --check

row: $(DEV)
	$(BIN)/python -m ci.local $(ROW)

nightly: $(DEV)
	$(BIN)/python -m ci.local --tier nightly

MUTANTS ?=
mutants: $(DEV)
	$(BIN)/python -m ci.mutants $(MUTANTS)

bench: $(DEV)
	$(BIN)/python -m benchmarks.cpu_decode

BACKEND ?= cuda
GPU ?= --jobs 3
gpu: $(DEV)
	$(BIN)/python -m ci.gpu_table --backend $(BACKEND) $(GPU)

clean:
	rm -rf $(VENV) .nox .halma build .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/halma.egg-info
