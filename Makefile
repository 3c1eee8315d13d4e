# make quickstart   train a small language model on this machine, from nothing
# make test         lint, type-check and test
#
# Both make their own virtual environment. Choose the interpreter with PYTHON=python3.12.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
MODEL_DIR ?= runs/quickstart
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint format benchmarks clean

quickstart: $(VENV)/.train
	$(BIN)/python -m train --gin_file=configs/runs/quickstart.gin --gin.MODEL_DIR="'$(MODEL_DIR)'"

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/.dev
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/dispatch.py

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) (once, about a minute)"
	@$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) (once, about a minute)"
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs/quickstart .pytest_cache .mypy_cache .ruff_cache
