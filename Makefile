# Everything here works on a clean checkout with Python 3.11 or later and a package index.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: run test lint types unit k8s-check chaos fuzz mutants bench reproduce constraints clean

run: .venv/installed  ## train the handwritten digits on this machine
	$(BIN)/fedstream run

test: lint types k8s-check unit  ## all that CI checks

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

unit: .venv/installed
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder  # most wait for a process; the long ones not last

k8s-check: .venv/installed .venv-checkov/installed  ## the manifests in k8s/, without a cluster
	$(BIN)/python -m tests.k8s.policy

chaos: .venv/installed  ## 200 faults in a real pipeline; the table in benchmarks/results (some minutes)
	$(BIN)/python -m tests.chaos --faults 200

fuzz: .venv/installed  ## 100,000 hostile inputs for everything that reads what others wrote (a minute or two)
	$(BIN)/python -m tests.fuzz --inputs 100000

mutants: .venv/installed  ## 200 small faults, one at a time: would a test notice? (an hour or two)
	$(BIN)/python -m tests.mutants --mutants 40 --csv benchmarks/results/mutants.csv

bench: .venv/installed  ## the tables in benchmarks/results (some minutes)
	$(BIN)/python -m benchmarks.end_to_end
	$(BIN)/python -m benchmarks.devices
	$(BIN)/python -m benchmarks.journal
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.scaling

reproduce: .venv/installed  ## AFL's tables 2 and 3 and figures 1, 2, 5 on MNIST anew (FEDSTREAM_DATA; about half an hour)
	$(BIN)/python -m fedstream reproduce --again afl-mnist-table2 afl-mnist-table3 afl-mnist-scaffold afl-mnist-arrivals

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# An environment of its own: what checkov depends on fights with what we do.
.venv-checkov/installed: tests/k8s/policy/checkov-constraints.txt
	$(PYTHON) -m venv .venv-checkov
	.venv-checkov/bin/pip install --quiet --disable-pip-version-check --constraint $< checkov
	touch $@

constraints: .venv/installed  ## pin what is installed now
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf .venv .venv-checkov build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
