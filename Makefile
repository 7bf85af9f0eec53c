# Everything a developer types. `make env` is a step of each target that needs it, and does nothing when it is up to date.
#
#   PYTHON=python3.11        the interpreter that .venv is made with: 3.11 or newer, the first found
#   TORCH_INDEX=<url>        the package index of a build of torch for your GPU (see README.md); used for torch only
#   ARGS="..."               more arguments for pytest
#   EXAMPLES=n               examples that hypothesis draws for each property in `make equivalence`

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do if $$p -c '' 2>/dev/null; then echo $$p; break; fi; done)
TORCH_INDEX ?=
EXAMPLES ?= 200
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.collie-env
TORCH_RECORD := $(VENV)/.torch-index
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYPROJECTS := $(wildcard packages/*/pyproject.toml) tools/pyproject.toml

# One thread a process, since the ranks of a test share the machine; nothing is written outside the checkout.
export OMP_NUM_THREADS ?= 1
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.build/torch_extensions
export TOKENIZERS_PARALLELISM := false
export WANDB_MODE ?= offline
export PYTHONPATH :=

.PHONY: help env demo test lint format equivalence bench pants clean distclean FORCE

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make env          .venv with all packages, editable, under constraints.txt
env: $(STAMP)

# Another build of torch is asked for than the one recorded: the environment is out of date.
ifneq ($(TORCH_INDEX),)
ifneq ($(TORCH_INDEX),$(shell cat $(TORCH_RECORD) 2>/dev/null))
$(STAMP): FORCE
endif
endif

# torch comes first, since building DeepSpeed imports it; from an index of its own in two steps, since such an index has
# torch and its GPU libraries, but not the versions that constraints.txt pins of everything else. The siblings are named in one command so that each is resolved
# from this checkout and never from an index.
$(STAMP): constraints.txt $(PYPROJECTS)
	@echo "making the environment in $(VENV): about a minute, longer where much is to be downloaded"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet -c constraints.txt setuptools
	@if [ -n "$(TORCH_INDEX)" ] && [ "$(TORCH_INDEX)" != "$$(cat $(TORCH_RECORD) 2>/dev/null || true)" ]; then \
	  $(PIP) uninstall --quiet --yes torch; \
	  $(PIP) install -c constraints.txt --no-deps --index-url "$(TORCH_INDEX)" torch; \
	  $(PIP) install --quiet -c constraints.txt --extra-index-url "$(TORCH_INDEX)" torch; \
	  echo "$(TORCH_INDEX)" > $(TORCH_RECORD); \
	else \
	  $(PIP) install --quiet -c constraints.txt torch; \
	fi
	@$(PIP) install --quiet -c constraints.txt numpy packaging
	@$(PIP) install --quiet -c constraints.txt --no-build-isolation \
	  -e packages/collie-parallel -e packages/collie-eval -e 'packages/collie-train[wandb,tensorboard]' \
	  -e packages/collie-compat -e 'tools[dev]'
	@touch $@

## make demo         trains, evaluates, saves and reloads a small Llama on two CPU processes (about two minutes)
demo: env
	$(BIN)/torchrun --nproc_per_node 2 examples/demo.py

## make test         the whole suite
test: env
	$(BIN)/python -m pytest $(ARGS)

## make lint         ruff, mypy and the layer rule
lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/collie layers

## make format       what ruff can mend by itself
format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make equivalence  layouts against one process, EXAMPLES=n examples a property
equivalence: env
	COLLIE_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/equivalence --timeout 0 $(ARGS)

## make bench        seconds a step: bare torch loop, our Trainer, transformers' Trainer
bench: env
	for script in benchmarks/*.py; do $(BIN)/python "$$script"; done

## make pants        Pants' graph checks and the four wheels (needs a Python 3.9 for Pants itself)
pants:
	$(PYTHON) tools/pants_check.py

## make clean        caches and builds; make distclean also the environments
clean:
	rm -rf .build dist packages/*/build tools/build .mypy_cache .pytest_cache .ruff_cache .hypothesis .pants.d
	find packages tools tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV) .venv-pants .pants.rc .pids packages/*/src/*.egg-info tools/src/*.egg-info
