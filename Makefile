# make quickstart   train a small language model on this machine, from nothing
# make test         lint, type-check and test
# make notebooks    execute the notebooks and write what they show into them
#
# Each makes its own virtual environment: the one for tests also holds the compilers for TPUs and
# GPUs, which jax would look for devices with. Choose the interpreter with PYTHON=python3.12.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
MODEL_DIR ?= runs/quickstart
DEV ?= $(VENV)-dev
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint format notebooks benchmarks clean

quickstart: $(VENV)/.train
	$(VENV)/bin/python -m train --gin_file=configs/runs/quickstart.gin --gin.MODEL_DIR="'$(MODEL_DIR)'"

# Two workers, a file each at a time; no more, for the tests of several processes need cores too.
test: lint
	$(DEV)/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(DEV)/.dev
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy

format: $(DEV)/.dev
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

notebooks: $(DEV)/.dev
	$(DEV)/bin/python notebooks/execute.py $(NOTEBOOKS)

benchmarks: export JAX_PLATFORMS ?= cpu
benchmarks: $(DEV)/.dev
	$(DEV)/bin/python benchmarks/import_time.py
	$(DEV)/bin/python benchmarks/dispatch.py
	$(DEV)/bin/python benchmarks/mesh_scale.py
	$(DEV)/bin/python benchmarks/resolve.py
	$(DEV)/bin/python benchmarks/layout_scale.py
	$(DEV)/bin/python benchmarks/input.py

$(VENV)/.python $(DEV)/.python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.train: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) (once, about a minute)"
	@$(VENV)/bin/python $(PIP) --editable '.[train]'
	@touch $@

$(DEV)/.dev: $(DEV)/.python pyproject.toml
	@echo "installing into $(DEV) (once, about a minute)"
	@$(DEV)/bin/python $(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(DEV) runs/quickstart .pytest_cache .mypy_cache .ruff_cache
