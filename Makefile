# Each target does its own set-up: Python >= 3.11 and make are all a machine needs.
#   make demo       trains the small model of experiments/configs/demo.py and leaves its curve in runs/demo
#   make test       the fast tests            make test-all   the heavier ones as well (envs wants bubblewrap)
#   make nightly    all of them at length, compiled as users run them, and the fast ones on the newest jax
#   make lint       ruff                      make lock       resolves requirements.lock anew
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/installed
PARITY := .venv/parity
COMPILERS := .venv/compilers
NEWEST := .venv/newest
# The newest jax wants a newer Python than 3.11.
NEWEST_PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
HEAVY := kernels or envs or scale or rollout or docs or parity
# Workers beyond two gain little: XLA already uses every core. Who is done first takes over some of what the other has.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: setup demo test test-all nightly lint lock clean
.NOTPARALLEL:

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "glm-jax wants Python 3.11 or later: none found. Install one, or say PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: $(STAMP)
	$(BIN)/glm-jax train --config experiments/configs/demo.py --workdir runs/demo

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP) $(PARITY) $(COMPILERS)
	$(PYTEST) -m "($(HEAVY)) and not (compile or nightly)"
	TESTS_COMPILE=full PYTHONPATH=$(COMPILERS) $(PYTEST) -m "compile and not nightly"

nightly: export TESTS_COMPILE := full
nightly: $(STAMP) $(PARITY) $(COMPILERS) $(NEWEST)
	$(PYTEST)
	$(PYTEST) -m "($(HEAVY) or nightly) and not compile"
	PYTHONPATH=$(COMPILERS) $(PYTEST) -m compile
	JAX_PLATFORMS=cpu $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -q

$(NEWEST): $(STAMP)
	@test -n "$(NEWEST_PYTHON)" || { echo "the newest jax wants Python 3.12 or later: none found. Say NEWEST_PYTHON=/path/to/python3" >&2; exit 1; }
	rm -rf $@ && $(NEWEST_PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$@/bin/python -m pip install --quiet --disable-pip-version-check --upgrade jax jaxlib
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .

# torch from its CPU index: the default build brings gigabytes of CUDA. Every package is looked up there, hence few retries.
$(PARITY): $(STAMP)
	$(BIN)/python -m pip install --quiet --retries 1 --disable-pip-version-check --no-build-isolation \
		--extra-index-url https://download.pytorch.org/whl/cpu -e ".[parity]"
	touch $@

# XLA's compilers for TPU and GPU stand apart: installed beside jax, they would look for a device whenever jax starts.
$(COMPILERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new $$($(BIN)/python .ci/compilers.py)
	rm -rf $@ && mv $@.new $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lock:
	$(PYTHON) .ci/lock.py python3.11 python3.12

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache *.egg-info
