# The same few commands by hand and in CI. `make` alone lists them. Works with GNU make 3.81 and newer.
.DEFAULT_GOAL := help
.PHONY: help setup references quickstart test check lint types imports budgets format lock clean

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ARGS ?=

# The first Python on the path that is new enough; `make setup PYTHON=/path/to/python3.12` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)

# A caller's active environment or pip settings must not redirect what goes into $(VENV); indexes and mirrors still apply.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_NO_DEPS
export PIP_USER := 0

# Stamps carry a checksum of what they were made from, and of the folder, since environments do not survive a move.
LOCK_STAMP := $(VENV)/.lock-$(shell { echo '$(CURDIR)'; cat requirements.lock; } | cksum | tr ' ' '-')
PROJECT_STAMP := $(VENV)/.project-$(shell { echo '$(CURDIR)'; cat pyproject.toml; } | cksum | tr ' ' '-')

REFERENCES_STAMP := $(VENV)/.references-$(shell { echo '$(CURDIR)'; cat requirements-references.txt; } | cksum | tr ' ' '-')

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(PROJECT_STAMP)  ## create .venv from the lock, and install mgrpo into it
	@echo "setup: $(VENV) is ready ($$($(PY) --version))"

$(LOCK_STAMP): | requirements.lock
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 to 3.14 found; install one, or say make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "setup: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "setup: installing the $$(grep -c == requirements.lock) packages of requirements.lock: 1.3 GB on disk, mostly torch; a minute or two"
	@$(PIP) install --quiet --no-deps --no-compile --requirement requirements.lock
	@$(PIP) check >/dev/null || { \
		echo "setup: this platform's torch needs packages beside the lock (CUDA libraries); adding them"; \
		$(PIP) install --quiet --constraint requirements.lock torch; }
	@$(PIP) check
	@touch $@

$(PROJECT_STAMP): $(LOCK_STAMP) | pyproject.toml
	@echo "setup: installing mgrpo itself, editable"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(PIP) check
	@rm -f $(VENV)/.project-*
	@touch $@

quickstart: setup  ## train the small team on this machine; ARGS="--seed 1" is passed on
	$(VENV)/bin/mgrpo train recipes/quickstart.toml $(ARGS)

references: $(REFERENCES_STAMP)  ## fetch TRL and verl, whose formulas the tests compare with ours

$(REFERENCES_STAMP): requirements-references.txt | $(PROJECT_STAMP)
	@rm -rf $(VENV)/references $(VENV)/.references-*
	@$(PIP) install --quiet --no-deps --no-compile --target $(VENV)/references --requirement requirements-references.txt \
		&& touch $@ || echo "references: TRL and verl could not be fetched; the tests that compare with them will skip" >&2

test: setup references  ## run every test, a process per core; ARGS="-k lock" is passed on
	$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

check: lint types imports budgets  ## lint, formatting, types, import layers, size budgets

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: setup
	$(VENV)/bin/mypy

imports: setup
	$(VENV)/bin/lint-imports

budgets: setup
	$(PY) -m pytest -q tests/unit/test_budgets.py

format: setup  ## put the code in the common format
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

# torch and transformers come first, so that nothing else chooses their release. Run it on the oldest supported Python.
LOCK_FIRST := torch==2.13.0 transformers==5.19.0
lock:  ## resolve pyproject.toml anew and rewrite requirements.lock
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install --quiet $(LOCK_FIRST)
	.venv-lock/bin/python -m pip install --quiet $(LOCK_FIRST) --editable '.[dev]'
	.venv-lock/bin/python -m pip check
	.venv-lock/bin/python -m pip freeze --all --exclude pip --exclude mgrpo | sed 's/+[a-z0-9.]*$$//' > requirements.lock
	rm -rf .venv-lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-lock build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
