# make help        lists the targets
# make demo        the first thing to try
#
# Every target sets up .venv by itself, once, and again when setup.py or constraints.txt change. pip's own settings
# (PIP_INDEX_URL and the like) decide where packages come from.

# The first interpreter here that is a 3.11 or 3.12 and can make a virtual environment. Or name one: make test PYTHON=...
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)
# Processes that run tests, each with one thread.
WORKERS ?= 2
# make sweep: samples of each entry, evenly spread. All of them if empty.
SAMPLES ?=
# More arguments for pytest: make test ARGS="tests/solvers -x"
ARGS ?=
# Another torch than that of constraints.txt, in a virtual environment of its own: make test TORCH=2.14.1
TORCH ?=

VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
# What `make test` runs: what takes minutes stands under `make sweep`; "gpu" needs a CUDA device.
MARKS = $(shell $(BIN)/python -c 'import torch; print("not sweep" if torch.cuda.is_available() else "not sweep and not gpu")')
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all test-processors sweep sweep-workspace lint docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.ready ## train a small model with and without roamc and print what it saved
	@$(BIN)/roamc demo

test: $(VENV)/.ready ## run the tests (without those marked gpu where there is no CUDA device)
	$(PYTEST) -m "$(MARKS) and not thorough" $(ARGS)

test-rest: $(VENV)/.ready ## run the tests that make test leaves out, the second tier
	$(PYTEST) -m "$(MARKS) and thorough" $(ARGS)

test-all: ## both
	$(MAKE) test
	$(MAKE) test-rest

# What other processors would run: kernels of ATen, MKL and oneDNN for smaller instruction sets.
PROCESSORS ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=AVX2

test-processors: $(VENV)/.ready ## make test as other processors would run it, once for each of PROCESSORS
	@failed=; for processor in $(PROCESSORS); do echo "== $$processor"; \
		env $$processor $(MAKE) --no-print-directory test || failed="$$failed $$processor"; done; \
		test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

sweep: $(VENV)/.ready ## all of what `make test` samples: torch's databases, random models and programs, strangers' models, changed plans; takes hours
	$(PYTEST) -m sweep
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_databases --workers $(WORKERS) $(SAMPLES:%=--samples %) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_models --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_models --family in-place --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_peaks --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_transformers --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_plans
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.run_strangers --workers $(WORKERS)
	$(BIN)/python -m tests.sweeps.run_programs --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.steps --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.edited_dumps --workers $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweeps.torch_road --workers $(WORKERS)

sweep-workspace: $(VENV)/.ready ## bytes that torch's operators take on the heap, beside those counted for them; takes an hour
	$(BIN)/python -m tests.sweeps.run_workspaces --workers $(WORKERS) $(SAMPLES:%=--samples %) $(ARGS)

lint: $(VENV)/.ready build/types ## ruff, mypy --strict, and the rules on imports and lengths
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/types && $(CURDIR)/$(BIN)/mypy --strict --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p roamc
	$(BIN)/pytest -q tests/test_architecture.py tests/test_repository.py

docs: $(VENV)/.ready ## build the documentation into build/site; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.ready ## run every script in benchmarks/ and write the tables; takes hours
	@for table in example peak speed fuse kernels budget "budget --falling" "budget --processes 5" kept "kept --dtype bfloat16" exact repeats planning cost workspace order_layout retain_rivals table; do \
		echo "== $$table"; $(BIN)/python -m benchmarks.$$table || exit 1; done

clean: ## remove builds and caches; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find roamc passes solvers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Editable in the default mode: new files are seen without another install. What compiles the solvers is installed first:
# their machine code fits one version of numba.
$(VENV)/.ready: setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "roamc needs Python 3.11 or 3.12 with venv. Name one: make PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): once, some minutes, most of them for PyTorch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/;/^setuptools==/d;/^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt "setuptools>=77" numba ortools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt --no-build-isolation \
		-e ".[test,bench,dev,docs]"
	@touch $@

# The three folders under the names they have in Python, as links: mypy follows no editable install.
.PHONY: build/types
build/types:
	@rm -rf $@ && mkdir -p $@/roamc
	@ln -s $(CURDIR)/roamc/* $(CURDIR)/passes $(CURDIR)/solvers $@/roamc/
