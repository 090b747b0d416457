# Each target does its own set-up: Python >= 3.11 and make are all a machine needs.
#   make demo       trains the small model of experiments/configs/demo.py and leaves its curve in runs/demo
#   make test       the fast tests            make test-all   the heavier rooms, marker by marker (envs wants bubblewrap)
#   make lint       ruff                      make lock       resolves requirements.lock anew
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/installed
PARITY := .venv/parity
COMPILERS := .venv/compilers
MARKERS := kernels compile envs scale rollout docs parity
# Workers beyond two gain little: XLA already uses every core.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 -q

.PHONY: setup demo test test-all lint lock clean
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
	@for marker in $(MARKERS); do echo "== $$marker"; \
		if [ $$marker = compile ]; then export PYTHONPATH=$(COMPILERS); else unset PYTHONPATH; fi; \
		$(PYTEST) -m $$marker || exit $$?; done

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
