# make sweep   measure the TFLA kernels and their baselines (KERNEL=, GPU=, ARGS="--preset quick ...")
# make results measure what the committed results of this GPU lack of this code, for 8 minutes; again until it is all
# make test    set up with the development tools and run the tests
# make lint    style, types and the project's own conventions and ceilings
#
# Everything runs in .venv (VENV=...), which is made when it is missing from python3 (PYTHON=...). pip's own settings,
# an index or a folder of wheels, come from the environment.

VENV ?= .venv
KERNEL ?= tfla
GPU ?= h100
ARGS ?=
TIME_LIMIT ?= 480

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export PYTHONSAFEPATH := 1
# Tests and their processes import the same modules hundreds of times: compiling them anew takes a tenth of that.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INPUTS := pyproject.toml setup.py constraints.txt .ci/setup
PYTEST := $(BIN)/pytest -q
# A test uses one core: threads of torch that wait for one another on shared cores take several times as long. Tests that
# limit how long an answer may take run alone, last.
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 8 --dist worksteal
# The oldest Triton that kernels in Gluon run with; constraints.txt has the newest, with which all tests run.
OLDER_TRITON := 3.6.0
OLDER := $(VENV)/triton-$(OLDER_TRITON)
MYPY_ROOT := .mypy_cache/root

.PHONY: help setup sweep results pages test test-main test-speed test-interpret test-compile test-slow test-gpu lint format clean

help:
	@sed -n 's/^# \?//p;/^$$/q' Makefile

$(VENV)/.ready: $(INPUTS)
	.ci/setup $(VENV) ''
	@touch $@

$(VENV)/.ready-dev: $(INPUTS)
	.ci/setup $(VENV) dev
	@touch $(VENV)/.ready $@

setup: $(VENV)/.ready-dev

sweep: $(VENV)/.ready
	$(BIN)/lrbench sweep --kernel $(KERNEL) --gpu $(GPU) $(ARGS)

# Exit 1, and no pages, as long as something is left: results/ACCELERATOR holds what was measured, whatever ended a call.
results: $(VENV)/.ready
	$(BIN)/lrbench results --run --time-limit $(TIME_LIMIT)
	$(MAKE) pages

# What follows from the committed results: their derived columns, pages and figures.
pages: $(VENV)/.ready
	$(BIN)/lrbench results --derive --format markdown > results/README.md
	$(BIN)/lrbench reproduce --format markdown > docs/reproductions.md
	$(BIN)/lrbench results --triton --format markdown > docs/triton.md
	$(BIN)/lrbench plot runtime results/h200_sxm --kernel tfla --tokens 64k --head-dim 256 --head-dim-qk 128 \
	    -o docs/figures/tfla_h200.png
	$(BIN)/lrbench plot model results/h200_sxm --gpu h100,h200,b200 -o docs/figures/model_h200.png
	$(BIN)/lrbench roofline results/h200_sxm --gpu h200,b200 --kernel tfla --op mlstm_sig,mlstm_exp,attention --mode fw \
	    --tokens 64k --seq-len 8k --head-dim 256 -o docs/figures/roofline_h200.png

# Processes of their own, since triton reads TRITON_INTERPRET once, when it is imported. pytest exits with 5, and so make
# fails, when a stage finds no test.
test: test-interpret test-compile test-main test-speed

test-interpret: $(VENV)/.ready-dev
	TRITON_INTERPRET=1 $(PARALLEL) -m "interpret and not slow"

test-compile: $(VENV)/.ready-dev $(OLDER)/.ready
	$(PARALLEL) -m "compile and not slow"
	PYTHONPATH="$(CURDIR)/$(OLDER)" $(PARALLEL) -m "older and not slow" tests/kernels/test_compile.py

$(OLDER)/.ready: $(VENV)/.ready-dev
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDER) triton==$(OLDER_TRITON)
	@touch $@

# A file's tests share what takes longest, such as a report, so that one process runs them.
test-main: $(VENV)/.ready-dev
	$(PARALLEL) --dist loadfile -m "not interpret and not compile and not gpu and not slow and not speed"

test-speed: $(VENV)/.ready-dev
	$(PYTEST) -m "speed and not gpu and not slow"

test-slow: $(VENV)/.ready-dev
	$(PARALLEL) -m "slow and not gpu and not interpret"

# Compiling takes most of the time, so the kernels' tests run side by side; what times a GPU, or fills it, runs alone.
test-gpu: $(VENV)/.ready-dev
	$(PARALLEL) -m "gpu and not slow" tests/kernels
	$(PYTEST) -m "gpu and slow" tests/kernels
	$(PYTEST) -m gpu --ignore tests/kernels

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/conventions.py
	$(BIN)/python .ci/ceilings.py
	@mkdir -p $(MYPY_ROOT) && ln -sfn "$(CURDIR)" $(MYPY_ROOT)/lrbench
	MYPYPATH=$(MYPY_ROOT) $(BIN)/mypy --config-file pyproject.toml \
	    -p lrbench.bench -p lrbench.kernels -p lrbench.analysis -p lrbench.results -m lrbench.cli

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
