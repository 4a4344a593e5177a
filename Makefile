# Each target sets up what it needs in .venv once; the stamp makes the second run immediate.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROFILE ?= cpu
JOBS ?= 2

.PHONY: install findings test lab check unit browser benchmarks lock clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Workbench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q --progress-bar on -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

install: $(VENV)/.installed  ## set up .venv, which every other target does by itself

findings: $(VENV)/.installed  ## run the ladder (PROFILE=cpu), build site/, print the page to open
	@$(BIN)/workbench ladder --profile $(PROFILE); ladder=$$?; \
	  case $$ladder in 0|1) $(BIN)/workbench site || exit $$?;; esac; exit $$ladder

test: check unit  ## everything CI runs: lint, types, layers, tests

check: $(VENV)/.installed  ## lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.installed  ## the tests alone
	$(BIN)/pytest -n $(JOBS) --dist loadfile

lab: $(VENV)/.installed  ## JupyterLab on 127.0.0.1
	$(BIN)/workbench lab

browser:  ## a Chromium for the browser tests, where none is installed
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "install Chromium, or set WORKBENCH_CHROMIUM to its path" >&2; exit 1; fi

benchmarks: $(VENV)/.installed  ## measure this machine (minutes); tests assert no times, these report them
	$(BIN)/python tests/benchmarks/bench_protocol.py
	$(BIN)/python tests/benchmarks/bench_trainer_overhead.py
	$(BIN)/python -m tests.benchmarks.bench_runs

lock: $(VENV)/.installed  ## pin the newest versions that pyproject.toml allows, torch apart
	$(BIN)/python -m pip install -q pip-tools
	torch=$$(grep -oE '^torch==[0-9.]+' requirements.lock); \
	$(BIN)/pip-compile -q --upgrade --extra dev --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-options \
	  --no-emit-trusted-host --no-annotate --no-header -P $$torch -o requirements.lock pyproject.toml; \
	sed -i.bak "s/^torch==.*/$$torch/" requirements.lock && rm requirements.lock.bak

clean:  ## remove what was built; runs/ stays
	rm -rf $(VENV) site build *.egg-info .mypy_cache .ruff_cache .pytest_cache
