# Every target sets up what it needs. An interpreter of your own, with vLLM in it already (CUDA):
#     make test VENV=none PYTHON=/path/to/python

VENV ?= .venv

ifeq ($(VENV),none)
PYTHON ?= python3
PY := $(PYTHON)
else
# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(firstword $(foreach p,python3.11 python3 python3.12 python3.13,$(shell \
    $(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
PY := $(VENV)/bin/python
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo check test test-all coverage test-next lint types policies docs docs-version format lock
.PHONY: release clean
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 21

venv: ## set up the environment in .venv (two to five minutes; nothing to do the second time)
ifeq ($(VENV),none)
	@echo "environment: $(PYTHON), as it is"
	@$(PYTHON) -c 'import vllm_autoprune' 2>/dev/null || { \
	    echo 'not installed there; run: $(PYTHON) -m pip install -e ".[dev,bench,search]"' >&2; exit 1; }
else
	@test -n "$(PYTHON)" || { \
	    echo "Python 3.11 or newer is needed (apt-get install python3 python3-venv), or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py $(VENV)
endif

demo: venv ## serve two models, stock and pruned, and compare (minutes: it says how many)
	@echo "demo: benchmarks.demo"
	@$(PY) -m benchmarks.demo

check: lint types ## what to run after each change: lint, types, pins, quick tests of the core (within 90 seconds)
	@echo "tests: pins, language, policies, serving without an engine"
	@$(PY) -m pytest -q -m "not engine and not slow" -n $(CORES) --dist loadfile $(CORE) $(PYTEST)

# The engine tests need both cores for the engines that they start, so they follow the others.
CORES := $(shell nproc 2>/dev/null || echo 2)
CORE := tests/pins tests/tpdsl tests/ops tests/base_policies tests/golden tests/serving/unit tests/test_import_boundaries.py tests/test_budgets.py
test: lint types policies docs ## everything that CI runs: lint, types, states, site, tests (half an hour)
	@echo "tests 1/2: without an engine, on $(CORES) cores"
	@$(PY) -m pytest -q -m "not engine" -n $(CORES) --dist loadfile --no-loadscope-reorder $(PYTEST)
	@echo "tests 2/2: on real vLLM engines and servers"
	@$(PY) -m pytest -q -m engine $(PYTEST)

test-all: ## make test, and the exhaustive sweeps (two hours)
	@$(MAKE) test PYTEST=--exhaustive

# What runs in processes of engines is not seen: engines have tests of their own.
coverage: venv ## lines and branches of the packages that tests without an engine run (ten minutes; not in CI)
	@echo "coverage: tests without an engine"
	@$(PY) -m pytest -q -m "not engine and not slow" -n $(CORES) --dist loadfile \
	    --cov vllm_autoprune --cov offline_search --cov-branch --cov-report term:skip-covered $(PYTEST)

# A newer vLLM that has no CPU wheel yet: the ordinary wheel without its dependencies. Its sources hide
# the installed vLLM's, its kernels stay unused. vLLM takes the CPU by the name of its version. Remove
# when the release has a CPU wheel, and the lock names it. 0.33 reads requests by orjson, 0.32 does not.
NEXT := 0.33.0
.next/vllm-$(NEXT).dist-info/complete: | venv
	@echo "test-next: installing vLLM $(NEXT) without dependencies into .next"
	@rm -rf .next
	@$(PY) -m pip install --quiet --no-deps --only-binary :all: --target .next vllm==$(NEXT) orjson
	@sed -i 's/^Version: $(NEXT)$$/&+cpu/' $(@D)/METADATA
	@touch $@

# Releases other than the installed one are compared by their records, which test_versions.py reads.
# The variable lets versions that are not supported yet be tried.
test-next: .next/vllm-$(NEXT).dist-info/complete ## what needs no device, against the sources of vLLM 0.33 (minutes; not in CI)
	@PYTHONPATH=.next VLLM_AUTOPRUNE_ANY_VERSION=1 $(PY) -m pytest -q -m "not engine" -n $(CORES) --dist loadfile \
	    --ignore tests/serving/unit/test_versions.py tests/serving/unit $(PYTEST)

lint: venv ## style and format, checked
	@echo "lint: ruff check, ruff format"
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "not formatted: run make format" >&2; exit 1; }

types: venv ## types, checked
	@echo "types: mypy"
	@$(PY) -m mypy

policies: venv ## shipped states, loaded and safety-checked
	@echo "policies: vllm-autoprune validate"
	@$(PY) -m vllm_autoprune validate policies/*.json > /dev/null || \
	    $(PY) -m vllm_autoprune validate policies/*.json

docs: venv ## build the documentation site in out/site, links checked
	@echo "docs: mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "docs: out/site/index.html; with its search: python -m http.server -d out/site"

# Of a minor version: mike calls `mkdocs` by name, so the environment is put first in PATH.
docs-version: venv ## build the site of this version into the local branch gh-pages (pushes nothing)
	@echo "docs-version: mike, branch gh-pages"
	@PATH="$(abspath $(dir $(PY))):$$PATH" && export NO_MKDOCS_2_WARNING=1 && \
	    mike --quiet deploy --update-aliases \
	    "$$(sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' vllm_autoprune/__init__.py)" latest && \
	    mike --quiet set-default latest

format: venv ## fix style and format where a machine can
	@echo "format: ruff"
	@$(PY) -m ruff check --quiet --fix . ; $(PY) -m ruff format .

lock: venv ## resolve requirements/ anew (LOCK=--keep: only what was added)
	@echo "lock: requirements/cpu.txt, requirements/release.txt"
	@$(PY) scripts/lock.py $(LOCK)

# Tools that nothing else needs, in an environment of their own.
.build/release/complete: requirements/release.txt
	@echo "release: setting up .build/release"
	@$(PYTHON) -m venv --clear .build/release
	@.build/release/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

release: .build/release/complete ## build and check the last commit in out/release (three minutes; publishes nothing)
	@.build/release/bin/python scripts/release.py

clean: ## remove the environment, builds and caches
	@echo "clean: .venv, .build, dist, caches"
	@rm -rf .venv .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
