# make demo    a real model learns a real task on two ranks, from nothing but Python and a package registry
# make test    what CI runs
VENV ?= .venv
PYTHON ?= python3.11
RANKS ?= 2
ARGS ?=
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports, which is a fraction of what is installed.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint launch/constraints-cpu.txt
# ... and must then be allowed to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY ?= PASSIVE
export OMP_NUM_THREADS ?= $(shell python3 -c "import os; print(max(1, len(os.sched_getaffinity(0)) // $(RANKS)))")

.PHONY: setup setup-test model demo test test-slow lint clean

# torch comes first and pinned: a plain `torch` would bring gigabytes of CUDA libraries.
$(BIN)/.setup: pyproject.toml launch/constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[demo]'
	$(BIN)/python -W ignore -c 'import reasoning_gym'  # compiles it, quietly: a dependency of its own warns
	touch $@

$(BIN)/.setup-test: $(BIN)/.setup
	$(PIP) --editable '.[demo,test,wandb,tensorboard,swanlab]'
	touch $@

setup: $(BIN)/.setup

setup-test: $(BIN)/.setup-test

model: $(BIN)/.setup
	$(BIN)/python -m spmd_rl.model.smollm2

demo: model
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m spmd_rl.rlvr $(ARGS)

test: $(BIN)/.setup-test model
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-slow: $(BIN)/.setup-test model
	$(BIN)/python -m pytest -m slow

lint: $(BIN)/.setup-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info
