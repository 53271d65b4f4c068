# `make` alone says what there is to make.

PYTHON ?= python3
# Of torch's builds for the CPU. Where it does not answer, pip gets torch as it is set up to.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Tests of a file run in one process, which keeps what they share. Three processes for two cores:
# tests of ranks that wait or die leave a core idle for a fifth of the time.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder --durations 20
GPUS ?=
CALLS ?= 1000000
BASE ?=

# Tests start hundreds of processes, of which each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

# The date whose part of long lists `make test` takes.
ifndef SAMPLE
SAMPLE := $(shell date -u +%F)
endif

BIN := .venv/bin
ENV := .venv/.stamp
CONSTRAINTS := constraints-cpu.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
# The oldest, those that torch brings where it is built for CUDA, the constrained one and the newest
# on the index, and the newest.
TRITONS := 3.6.0 3.7.1 3.8.0 $(shell sed -n 's/^triton<=//p' $(CONSTRAINTS))
COMPILERS := $(TRITONS:%=.tritons/%/.stamp)

DEMO := --op all_gather_matmul --shapes "m=16 n=64 k=64" --gpus 2 --db .demo/tuning.sqlite

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help prerequisites env demo test test-core test-all lint check-types soak soak-gpu test-gpu docs wheel
.PHONY: accept accept-long clean measure instructions site test-vllm report

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "The environment in .venv is for the CPU. Another Python (>= 3.11): make env PYTHON=python3.12"

prerequisites:
	@for tool in git $(PYTHON); do \
	  command -v $$tool >/dev/null || { \
	    echo "error: $$tool is not installed"; \
	    echo "hint: apt install git make python3 python3-venv"; exit 1; } >&2; \
	done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than 3.11"; \
	  echo "hint: name a newer one: make PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module"; \
	  echo "hint: apt install git make python3 python3-venv"; exit 1; } >&2

env: $(ENV) ## the environment in .venv, for the CPU

# The stamp is written last: without it an environment is half-made, and is made anew.
# Torch comes first and alone, from its own index if that answers and has all it needs (with a local
# wheel pip is content without an answer); the constraints keep it.
$(ENV): pyproject.toml $(CONSTRAINTS) | prerequisites
	@test -e $@ || rm -rf .venv
	@rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c $(CONSTRAINTS) pip
	$(BIN)/pip install $$({ $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/torch/", None, 10)' && \
	  $(BIN)/pip --retries 0 --timeout 10 install --dry-run --index-url $(TORCH_INDEX) $(TORCH); } >/dev/null 2>&1 && \
	  echo --index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/pip install -c $(CONSTRAINTS) -e '.[cpu,plot,report,check,chiplets,dev]'
	@touch $@

# Tests compile kernels with each of these; the installed one need not lie aside as well.
$(COMPILERS): .tritons/%/.stamp: $(ENV)
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/pip freeze | grep -x triton==$* >/dev/null || $(BIN)/pip install --no-deps --target $(@D) triton==$*
	@touch $@

demo: $(ENV) ## about a minute, no GPU: tune on two ranks, find a race, see where the time goes on eight GPUs
	@rm -rf .demo
	@mkdir .demo
	@echo "1. Two ranks on the CPU find the fastest right candidate; dispatch looks it up."
	$(BIN)/taxfree tune $(DEMO) --fabric host --trials 4
	$(BIN)/taxfree db why $(DEMO) --gpu CPU
	@echo "2. A kernel that waits without an acquire: which read races, and how to mend it."
	$(BIN)/taxfree check examples/ring.py::broken --ranks 2 || test $$? = 4
	@echo "3. Eight H200s: where a call's time goes, in the library and in one fused kernel."
	$(BIN)/taxfree explain --from benchmarks/results/explain/nvidia-h200-x8.json --shapes "m=512 n=3584 k=8192"
	@echo "4. Two H200s: the same, as one call."
	$(BIN)/taxfree explain --from benchmarks/results/timeline/nvidia-h200-x2.json --shapes "m=64 n=3584 k=8192"

test: lint $(COMPILERS) ## lint, types, import layers, tests that need no GPU; of long lists the part of today, or of the date SAMPLE
	$(BIN)/pytest $(PYTEST_ARGS) --sample $(SAMPLE)

test-core: lint ## of those, the tests of what an engine holds
	$(BIN)/pytest $(PYTEST_ARGS) --sample $(SAMPLE) tests/kernels tests/taxfree tests/tuning_db tests/models

# One run: each process collects seven thousand tests, and long files overlap with short ones.
test-all: lint instructions ## the same with all of the long lists, and instructions: what CI runs
	$(BIN)/pytest $(PYTEST_ARGS) --sample all

lint: $(ENV) ## ruff and the import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

check-types: $(ENV) ## mypy
	$(BIN)/mypy

soak: $(ENV) ## the long tests
	$(BIN)/pytest -m soak --sample all --timeout 1800

# On GPUs there is an environment already: that of the Python whose torch sees them.
ON_GPUS := PYTHONPATH=.:kernels:tuning_db:tune:check$(addprefix :,$(PYTHONPATH)) $(PYTHON)

test-gpu: ## the tests that need GPUs, one at least, with PYTHON's torch; what the instrument found to RECORD
	$(addprefix TAXFREE_INSTRUMENT_RECORD=,$(RECORD)) $(ON_GPUS) -m pytest -m gpu -v --durations 10 --sample all \
	  $$(grep -rlE 'on_every_fabric|mark\.gpu' tests --include='test_*.py')

accept: ## what a user runs, on GPUS GPUs, with PYTHON's torch; at most six minutes
	$(ON_GPUS) -m benchmarks.accept $(addprefix --gpus ,$(GPUS))

accept-long: ## and then the tests that need GPUs, and whole models, in steps that a later run goes on with
	$(ON_GPUS) -m benchmarks.accept --long $(addprefix --gpus ,$(GPUS))

test-vllm: ## the plugin in the real vLLM of PYTHON, where one is installed, and its signatures
	$(ON_GPUS) -m pytest tests/integrations/test_vllm_engine.py -v -rs --timeout 1200

measure: ## all that the documents show, on GPUS GPUs, with PYTHON's torch: an hour or more
	$(ON_GPUS) -m benchmarks.measure $(addprefix --gpus ,$(GPUS))

soak-gpu: ## CALLS calls of all variants on GPUS GPUs, with PYTHON's torch
	$(ON_GPUS) -m benchmarks.soak $(addprefix --gpus ,$(GPUS)) --calls $(CALLS)

docs: $(ENV) ## the documents as a site in site/, after those that are written from code; some minutes
	$(BIN)/python -m tests.bad_input.document
	$(BIN)/python -m tests.check.checker.document
	$(BIN)/python -m docs.scripts.api
	$(MAKE) site

site: $(ENV) ## the documents as a site in site/, as they are
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

instructions: $(COMPILERS) ## compare compiled instructions with those of the base commit BASE; some minutes
	$(BIN)/python -m benchmarks.instructions $(addprefix --base ,$(BASE))

wheel: $(ENV) ## a wheel in dist/
	$(BIN)/python -m build --wheel --no-isolation

report: $(ENV) ## docs/report.html, of the shipped tables and the committed results
	TAXFREE_DB=.report/none.sqlite $(BIN)/taxfree report --results benchmarks/results --out docs/report.html

clean: ## remove what was made here, but the environments
	rm -rf .demo build dist docs/report.html site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find taxfree taxfree_cli kernels tuning_db tune check tests -name __pycache__ -prune -exec rm -rf {} +
