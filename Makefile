# Two commands do everything: `make demo` trains a language model on this machine, `make test` proves the code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-fast test-process compose-test lint docs clean

demo: $(VENV)/.demo
	$(BIN)/slipstream up configs/smollm2-sums.yaml

test: test-fast test-process

# Two workers, one file at a time each: a server that a file starts serves all its tests.
test-fast: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not process and not vllm and not gpu and not compose"

# Real processes, started and killed; one at a time, since each stack wants both cores.
test-process: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "process and not vllm and not gpu and not compose"

# compose.yaml for real: builds the images, starts, kills and resumes; installs a Docker engine where there is none.
compose-test: $(VENV)/.test
	PATH=$(CURDIR)/$(BIN):$$PATH tests/compose/run

lint: $(VENV)/.test
	$(BIN)/ruff format --check common services tests benchmarks
	$(BIN)/ruff check common services tests benchmarks
	$(BIN)/mypy

docs: $(VENV)/.demo
	$(BIN)/slipstream config docs > docs/config.md
	$(BIN)/python k8s/make_chart.py

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[reasoning-gym]"
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable ".[reasoning-gym,datasets,test,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
