# make quickstart   train a small language model on this machine, from scratch
# make test         lint, type-check and test
# make test-long    the tests of tens of seconds each: notebooks, compilers, runs from start to end
# make test-processes  faults of several processes, by name and at random (an hour)
# make test-pod     faults of hosts with a network of their own (hours; Linux, as root)
# make smoke        test every room in under a minute
# make smoke-lowest the same with the lowest versions that pyproject.toml allows
# make notebooks    execute the notebooks and write their outputs into them
# make docs         build the documentation into build/site
# make wheel-check  install a wheel into a new environment, and train with it in an empty folder
# make lock         write the exact versions and hashes of what the tests use today to .ci/locks
# make vulnerabilities  look for known vulnerabilities of these versions
#
# Each command makes its own virtual environment. The one for tests also contains the compilers for
# TPUs and GPUs, which jax would otherwise use to look for devices. PYTHON=python3.12 chooses the
# interpreter. LOCKED=yes installs only the files whose hashes are in .ci/locks (Linux on x86-64).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
MODEL_DIR ?= runs/quickstart
DEV ?= $(VENV)-dev
LOWEST ?= $(VENV)-lowest
PARALLEL := -n 3 --dist worksteal --durations=20
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test test-long test-processes test-pod smoke smoke-lowest lint format notebooks \
	docs benchmarks wheel-check lock vulnerabilities clean

quickstart: $(VENV)/.train
	$(VENV)/bin/meshwright train quickstart --gin.MODEL_DIR='$(MODEL_DIR)'

# Three workers for two cores: tests that start processes wait for them most of the time.
test: lint
	$(DEV)/bin/python -m pytest $(PARALLEL) $(if $(PYTEST_ARGS),$(PYTEST_ARGS),-m "not long")

test-long: $(DEV)/.dev
	$(DEV)/bin/python -m pytest $(PARALLEL) -m long

# It can be stopped and started again: it does what the file of results lacks.
test-processes: $(DEV)/.dev
	$(DEV)/bin/python benchmarks/process_faults.py --results build/process_faults.jsonl --named \
		--random 200

test-pod: $(DEV)/.dev
	$(DEV)/bin/python benchmarks/pod_faults.py --results build/pod_faults.jsonl --hosts 8,16,64

smoke: $(DEV)/.dev
	$(DEV)/bin/python -m pytest -n 2 --dist loadfile -m smoke $(PYTEST_ARGS)

smoke-lowest: $(LOWEST)/.lowest
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile -m smoke $(PYTEST_ARGS)

lint: $(DEV)/.dev
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy

format: $(DEV)/.dev
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

notebooks: $(DEV)/.dev
	$(DEV)/bin/python notebooks/execute.py $(NOTEBOOKS)

# A warning is an error. The variable turns off an advertisement of the theme.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DEV)/.dev
	$(DEV)/bin/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

wheel-check: export JAX_PLATFORMS ?= cpu
wheel-check: $(DEV)/.dev
	$(DEV)/bin/python benchmarks/from_wheel.py

benchmarks: export JAX_PLATFORMS ?= cpu
benchmarks: $(DEV)/.dev
	$(DEV)/bin/python benchmarks/import_time.py
	$(DEV)/bin/python benchmarks/dispatch.py
	$(DEV)/bin/python benchmarks/mesh_scale.py
	$(DEV)/bin/python benchmarks/resolve.py
	$(DEV)/bin/python benchmarks/layout_scale.py
	$(DEV)/bin/python benchmarks/input.py
	$(DEV)/bin/python benchmarks/train_step.py
	$(DEV)/bin/python benchmarks/checkpoint.py

$(VENV)/.python $(DEV)/.python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.train: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) (once, about a minute)"
	@$(VENV)/bin/python $(PIP) --editable '.[train]'
	@touch $@

lock: $(DEV)/.dev
	PATH="$(abspath $(DEV))/bin:$$PATH" $(DEV)/bin/python .ci/lock

vulnerabilities: $(DEV)/.dev
	@for lock in .ci/locks/*.txt; do echo "-- $$lock"; $(DEV)/bin/uv tool run pip-audit --strict --no-deps \
		--disable-pip --require-hashes --progress-spinner=off --requirement "$$lock" || exit 1; done

ifdef LOCKED
$(DEV)/.dev: $(DEV)/.python pyproject.toml
	@echo "installing the files of .ci/locks into $(DEV) (once, a few minutes)"
	@$(DEV)/bin/python $(PIP) --no-deps --require-hashes --requirement \
		".ci/locks/$$($(DEV)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt"
	@$(DEV)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
else
$(DEV)/.dev: $(DEV)/.python pyproject.toml
	@echo "installing into $(DEV) (once, about a minute)"
	@# pip does not find versions that fit together among the libraries of S3; uv does at once.
	@$(DEV)/bin/python $(PIP) uv
	@$(DEV)/bin/uv pip install --quiet --python $(DEV)/bin/python --editable '.[dev]'
	@touch $@
endif

$(LOWEST)/.lowest: $(DEV)/.dev
	@echo "installing the lowest versions into $(LOWEST) (once, about a minute)"
	@$(DEV)/bin/uv venv --quiet --clear --python $(DEV)/bin/python $(LOWEST)
	@$(DEV)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		--requirements pyproject.toml --extra train --extra data --extra tokenizers --extra test
	@touch $@

clean:
	rm -rf $(VENV) $(DEV) $(LOWEST) build/site runs/quickstart .pytest_cache .mypy_cache .ruff_cache
