# Everything here works on a clean checkout with Python 3.11 or later and a package index.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# Nothing is installed but what requirements/ lists, and of it no other files than those of its hashes. Little of it is ever
# imported, so nothing is compiled ahead.
INSTALL := install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps
# One pip fills all environments: to install pip takes as long as to install a small one.
PIP := $(BIN)/pip

# Tests start hundreds of Python processes: none is to compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test fast lint format types unit flower docs help k8s-check cluster-test chaos chaos-mutants fuzz mutants bench reproduce lock dist sbom constraints clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

run: .venv/installed  ## train the handwritten digits on this machine
	$(BIN)/fedstream run

test:  ## all that CI checks; unit runs beside the others, once what all of them need is installed
	$(MAKE) --no-print-directory --jobs=4 .venv/installed .venv-tools/installed .venv-docs/installed .venv-checkov/installed .venv-flower/installed
	$(MAKE) --no-print-directory --jobs=2 unit lint types docs k8s-check flower

fast: .venv/installed  ## the tests that start no process, for the inner loop
	$(BIN)/pytest -q -m 'not process' --numprocesses auto --dist worksteal

lint: .venv/installed .venv-tools/installed  ## ruff, which package imports which, spelling, the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.venv-tools/bin/lint-imports --no-logo
	.venv-tools/bin/codespell
	.venv-tools/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	.venv-tools/bin/zizmor --offline --quiet --persona=pedantic .github

format: .venv/installed  ## rewrite the code as lint wants it, where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed  ## mypy
	$(BIN)/mypy

# Two for each core, since a test with processes mostly waits for them.
WORKERS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))

# What is done if tests fail; CI tries those once more, one at a time (.ci/run).
AGAIN ?= false

unit: .venv/installed  ## all tests
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder || $(AGAIN)  # the long files not last

flower: .venv-flower/installed  ## the tests of Flower apps, in an environment that Flower can share
	.venv-flower/bin/pytest -q tests/flower tests/docs/test_pages.py::test_flower

docs: .venv-docs/installed  ## the documentation as a site, in site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict  # Material is maintained until May 2027; then Zensical

k8s-check: .venv/installed .venv-checkov/installed  ## the manifests in k8s/, without a cluster; with CERTIFICATE=tls.crt OVERLAY=FOLDER whether Redis's certificate has all names
	$(BIN)/python -m tests.k8s.policy $(if $(CERTIFICATE),--certificate $(CERTIFICATE) $(OVERLAY))

cluster-test: .venv/installed  ## the manifests on the cluster of KUBECONFIG, as the docs say; the table in benchmarks/results (SEED, ARGS)
	$(BIN)/python -m tests.cluster --seed $(or $(SEED),0) $(ARGS)

chaos: .venv/installed  ## 720 faults in real pipelines; the tables in benchmarks/results (twenty minutes)
	$(BIN)/python -m tests.chaos --faults 240
	$(BIN)/python -m tests.chaos --faults 60 --sentinels
	$(BIN)/python -m tests.chaos --faults 120 --gateway
	$(BIN)/python -m tests.chaos.sums --faults 300

chaos-mutants: .venv/installed  ## faults planted in the code, which chaos must notice (half an hour)
	$(BIN)/python -m tests.chaos.mutants

fuzz: .venv/installed  ## 100,000 hostile inputs for everything that reads what others wrote, and as many requests (a quarter of an hour)
	$(BIN)/python -m tests.fuzz --inputs 100000
	$(BIN)/python -m tests.fuzz.raw_requests --inputs 100000
	$(BIN)/python -m tests.fuzz.by_schema --inputs 5000

# In a clone, since the faults are planted in its files.
MUTANTS ?= $(filter-out operators,$(patsubst tests/mutants/%.toml,%,$(wildcard tests/mutants/*.toml)))
mutants: .venv/installed .venv-mutants/installed  ## small faults, one at a time: would a test notice? (MUTANTS=journal; hours)
	rm -rf build/mutants
	git clone --quiet . build/mutants
	cd build/mutants && export PATH=$(CURDIR)/$(BIN):$(CURDIR)/.venv-mutants/bin:$$PATH PYTHONPATH=$$PWD PYTHONDONTWRITEBYTECODE=1; \
	for target in $(MUTANTS); do \
	    cosmic-ray init tests/mutants/$$target.toml $$target.sqlite || exit 1; \
	    cr-filter-operators $$target.sqlite tests/mutants/operators.toml || exit 1; \
	    cosmic-ray exec tests/mutants/$$target.toml $$target.sqlite || exit 1; \
	    cr-report --surviving-only --show-diff $$target.sqlite; \
	done; \
	python -m tests.mutants.lua

bench: .venv/installed  ## the tables in benchmarks/results (some minutes)
	$(BIN)/python -m benchmarks.end_to_end
	$(BIN)/python -m benchmarks.chain
	$(BIN)/python -m benchmarks.devices
	$(BIN)/python -m benchmarks.journal
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.flat
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.viewers

reproduce: .venv/installed  ## AFL's tables 2 and 3 and figures 1, 2, 5 on MNIST anew (FEDSTREAM_DATA; about half an hour)
	$(BIN)/python -m experiments --again afl-mnist-table2 afl-mnist-table3 afl-mnist-scaffold afl-mnist-arrivals

# $(1) with what requirements/ lists of $(2), and torch: PyTorch's CPU build where pip finds one, else the index's.
define locked
$(PIP) --python $(1)/bin/python $(INSTALL) --requirement requirements/torch-cpu.txt || { \
    echo "pip finds no CPU build of torch: taking the one of the index, and what it asks for"; \
    $(PIP) --python $(1)/bin/python $(INSTALL) --requirement requirements/torch-cuda.txt; }
$(PIP) --python $(1)/bin/python $(INSTALL) $(patsubst %,--requirement requirements/%.txt,$(2))
endef
TORCH := requirements/torch-cpu.txt requirements/torch-cuda.txt

# What takes longest to compile, so that processes that start side by side don't all do it.
LARGE := fedstream.cli.app, matplotlib.figure, sklearn.datasets, torch._dynamo, torch.onnx
.venv/installed: pyproject.toml $(TORCH) requirements/runtime.txt requirements/dev.txt | $(PIP)
	$(call locked,.venv,runtime dev)
	$(PIP) install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	$(BIN)/python -c "import $(LARGE)"
	touch $@

$(PIP):
	$(PYTHON) -m venv .venv

# What a user has, and no more; without pip, which nobody needs to run.
.venv-runtime/installed: pyproject.toml $(TORCH) requirements/runtime.txt | $(PIP)
	$(PYTHON) -m venv --without-pip .venv-runtime
	$(call locked,.venv-runtime,runtime)
	$(PIP) --python .venv-runtime/bin/python check
	touch $@

# Flower wants older releases of what .venv has. Beside it lies Flower alone in other releases, whose supernodes are tested too.
SUPERNODES := $(patsubst requirements/supernode-%.txt,%,$(wildcard requirements/supernode-*.txt))
.venv-flower/installed: pyproject.toml $(TORCH) requirements/flower.txt $(SUPERNODES:%=requirements/supernode-%.txt) | $(PIP)
	$(PYTHON) -m venv --without-pip .venv-flower
	$(call locked,.venv-flower,flower)
	for release in $(SUPERNODES); do \
	    $(PIP) --python .venv-flower/bin/python $(INSTALL) --upgrade --target .venv-flower/supernodes/$$release \
	        --requirement requirements/supernode-$$release.txt || exit 1; \
	done
	$(PIP) --python .venv-flower/bin/python install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(PIP) --python .venv-flower/bin/python check
	touch $@

# A peer to compare with (benchmarks/peers.py), on the same torch.
.venv-fedlab/installed: $(TORCH) requirements/fedlab.txt | $(PIP)
	$(PYTHON) -m venv --without-pip .venv-fedlab
	$(call locked,.venv-fedlab,fedlab)
	touch $@

# Environments of their own: what checkov depends on fights with what we do, and nothing of ours needs the
# tools of a release or of the documentation.
.venv-%/installed: requirements/%.txt | $(PIP)
	$(PYTHON) -m venv --without-pip .venv-$*
	$(PIP) --python .venv-$*/bin/python $(INSTALL) --requirement $<
	$(PIP) --python .venv-$*/bin/python check
	touch $@

lock: .venv-tools/installed  ## requirements/ anew: the hashes of what constraints.txt and pyproject.toml ask for
	.venv-tools/bin/python -m requirements.lock

dist: .venv-tools/installed  ## the wheel and the source archive
	rm -rf dist build
	.venv-tools/bin/python -m build --no-isolation --quiet

sbom: .venv-tools/installed .venv-runtime/installed  ## dist/fedstream.cdx.json: what a release consists of (CycloneDX)
	.venv-tools/bin/python -m requirements.sbom .venv-runtime/bin/python dist/fedstream.cdx.json

constraints: .venv/installed  ## pin what is installed now; then make lock
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:  ## remove what is built and installed
	rm -rf .venv .venv-checkov .venv-docs .venv-fedlab .venv-flower .venv-mutants .venv-runtime .venv-tools build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
