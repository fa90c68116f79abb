# Needs make and Python 3.11 or newer, nothing else. `make` alone says what there is.

PYTHON ?= python3
VENV ?= .venv
# Processes that run the tests; 0 runs them in one, for a debugger: make test WORKERS=0 ARGS='-k flight --pdb'
WORKERS ?= logical
# How long each of the soaks takes.
SECONDS ?= 600
# More arguments for the command: make serve ARGS='--upstream http://…', make test ARGS='-k flight -x'
ARGS ?=

BIN := $(VENV)/bin
PACKAGES := gateway cache backend prefix_store telemetry
INSTALLED := $(VENV)/.installed
CLIENTS := tests/clients/node_modules/.package-lock.json
# Commands of the environment before those of the machine: node and npm are there at a pinned version.
WITH_PATH := PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help install serve test soak chaos test-compose test-clients test-vllm soak-vllm test-sglang test-gpu sbom lint format docs docs-serve bench bench-compare bench-semantic bench-gpu lock wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv with everything in it (done by the others when needed)

$(INSTALLED): pyproject.toml constraints.txt scripts/install.py
	@$(PYTHON) -m scripts.install $(VENV)
	@touch $@

serve: $(INSTALLED) ## run gateway, embedded Valkey and the small model on :8080 (KEEPGATE_PORT moves it)
	@exec $(BIN)/keepgate serve $(ARGS)

test: $(INSTALLED) $(CLIENTS) ## run every test that CI runs
	@$(WITH_PATH) exec $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

$(CLIENTS): tests/clients/package-lock.json | $(INSTALLED)
	@echo "Installing the npm clients of the tests ..."
	@$(WITH_PATH) && export PATH && cd tests/clients && npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

soak: $(INSTALLED) ## random requests, faults and kills, SECONDS each (600); make test runs a short version
	@$(BIN)/python -m tests.backend.engine.soak $(SECONDS)
	@$(BIN)/python -m tests.prefix_store.tiers.soak $(SECONDS)
	@$(BIN)/python -m tests.chaos.soak $(SECONDS)

chaos: $(INSTALLED) ## fail upstreams, Redis, processes and the machine under load; a table, status 1 for any wrong answer
	@exec $(BIN)/python -m tests.chaos $(ARGS)

test-compose: $(INSTALLED) ## build compose.yaml and try it on a real Docker engine
	@exec $(BIN)/python -m pytest -s -m compose tests/compose $(ARGS)

sbom: $(INSTALLED) ## write what is installed in .venv as build/sbom.cdx.json (CycloneDX); images have their own
	@$(BIN)/python -m scripts.sbom build/sbom.cdx.json && echo build/sbom.cdx.json

# Two environments and a folder of npm packages, 2 GB; the tests are collected where the variable names their folder.
APPS := build/clients

test-clients: $(INSTALLED) ## run client libraries and apps against the gateway; installs 2 GB in build/clients
	@$(WITH_PATH) $(BIN)/python -m tests.apps.install $(APPS)
	@$(WITH_PATH) TEST_CLIENTS="$(abspath $(APPS))" exec $(BIN)/python -m pytest tests/apps $(ARGS)

VLLM := build/vllm

test-vllm: $(INSTALLED) ## run the KV connector and the gateway with vLLM for CPUs; installs 2 GB in build/vllm
	@$(BIN)/python -m tests.prefix_store.connectors.vllm_server.install $(VLLM)
	@TEST_VLLM="$(abspath $(VLLM))" exec $(BIN)/python -m pytest tests/prefix_store/connectors/vllm_server tests/gateway/vllm $(ARGS)

# Of soak-vllm; 10,000 take a quarter of an hour.
OPERATIONS ?= 10000

soak-vllm: $(INSTALLED) ## random requests and faults beside a vLLM without a connector, OPERATIONS of them (10000)
	@$(BIN)/python -m tests.prefix_store.connectors.vllm_server.install $(VLLM)
	@TEST_VLLM="$(abspath $(VLLM))" exec $(BIN)/python -m tests.prefix_store.connectors.vllm_server.soak $(OPERATIONS)

# These run in the environment itself, which has SGLang and what the backend needs of it.
SGLANG := build/sglang

test-sglang: $(INSTALLED) ## run the storage backend with SGLang's own cache classes; installs 2.5 GB in build/sglang
	@$(BIN)/python -m tests.prefix_store.connectors.sglang.install $(SGLANG)
	@KEEPGATE_SGLANG="$(abspath $(SGLANG))" exec $(SGLANG)/bin/python -m pytest \
	  --confcutdir tests/prefix_store/connectors/sglang tests/prefix_store/connectors/sglang $(ARGS)

# A machine with a GPU may have torch and Triton but no way to install more: there, its own Python runs these.
ON_GPU = if $(PYTHON) -c 'import torch, triton; assert torch.cuda.is_available()' 2> /dev/null; \
	then set -- $(PYTHON); else $(MAKE) --no-print-directory $(INSTALLED) && set -- $(BIN)/python; fi

test-gpu: ## check the CUDA kernels on a real device (skips without one)
	@$(ON_GPU); exec "$$@" -m pytest -m gpu tests/gpu $(ARGS)

lint: $(INSTALLED) ## ruff, its formatter, the layers of imports and the strict type checker
	@status=0; \
	$(BIN)/ruff check || status=1; \
	$(BIN)/ruff format --check || status=1; \
	$(BIN)/lint-imports --no-logo || status=1; \
	$(BIN)/mypy || status=1; \
	exit $$status

format: $(INSTALLED) ## let ruff put the code in order
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(INSTALLED) ## build the documentation site into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 exec $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(INSTALLED) ## serve the documentation site on :8000, and build it again at each change
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. exec $(BIN)/mkdocs serve $(ARGS)

bench: $(INSTALLED) ## measure, and write docs/benchmarks/
	@exec $(BIN)/python -m benchmarks $(ARGS)

bench-compare: $(INSTALLED) ## measure this checkout and another one in turn: make bench-compare OLD=../before
	@exec $(BIN)/python -m benchmarks.compare $(OLD) $(ARGS)

bench-semantic: $(INSTALLED) ## measure the semantic cache alone, and write docs/benchmarks/
	@exec $(BIN)/python -m benchmarks semantic_streams semantic_judge semantic_pairs semantic_traps semantic_latency semantic_index semantic_lines semantic_peers encoders $(if $(KEEPGATE_BENCH_MODEL),semantic_languages) $(ARGS)

bench-gpu: ## measure the engine on one GPU against transformers, in under ten minutes
	@$(ON_GPU); exec "$$@" -m benchmarks.engine.gpu $(ARGS)

lock: ## choose the newest versions again and pin them in constraints.txt
	@$(PYTHON) -m scripts.lock

wheel: $(INSTALLED) ## build the package into dist/
	@rm -rf build/lib build/bdist.* *.egg-info # their old files would be packed again
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --no-index -w dist .
	@rm -rf build/lib build/bdist.* *.egg-info
	@ls dist/*.whl

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info tests/clients/node_modules
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PACKAGES) tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +
