# Every target that needs Python first creates .venv, and updates it when pyproject.toml, constraints.txt or proto/ change.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

BIN := .venv/bin
READY := .venv/.ready
RUNNABLE := .venv/.runnable
JOBS ?= 2
SEED ?= 1
DATA ?= data

PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# A suite may have no tests yet; pytest's exit code 5 is not a failure.
NONE_IS_FINE := || [ $$? -eq 5 ]
SPREAD := -n $(JOBS) --dist loadgroup

# A name on PATH may not be a usable Python: version managers leave stubs, distributions omit ensurepip.
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

define MAKE_VENV
@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
  for python in $(PYTHON) python3.13 python3.12 python3.11 python3 python; do \
    if $$python -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "Heapline needs Python 3.11 or newer with venv. Install one, or name it: make PYTHON=/path/to/python3"; \
    exit 1; \
  fi; \
  echo "Creating .venv with $$($$found --version) …"; \
  $$found -m venv --clear .venv || exit 1; \
fi
endef

# `make run` needs the server alone: a tenth of the download of the development environment.
$(RUNNABLE): pyproject.toml constraints.txt hatch_build.py src/heapline/dashboard/third_party.toml src/heapline/_accelerator.c $(wildcard proto/heapline/v1/*.proto)
	$(MAKE_VENV)
	@if [ -e $(READY) ]; then extra=dev; else extra=server; fi; \
	  echo "Installing Heapline ($$extra) into .venv …"; \
	  $(PIP) install --constraint constraints.txt --editable ".[$$extra]"
	@touch $@

$(READY): pyproject.toml constraints.txt hatch_build.py src/heapline/dashboard/third_party.toml src/heapline/_accelerator.c $(wildcard proto/heapline/v1/*.proto)
	$(MAKE_VENV)
	@echo "Installing Heapline and its development tools into .venv …"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(RUNNABLE)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(READY) browser ## Create .venv and install everything into it, and the browser that tests need

# Debian's chromium, where this may install it. Without a browser the dashboard's tests are skipped.
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends

.PHONY: browser
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing chromium …" && \
	  { $(APT_INSTALL) chromium || { apt-get update -qq && $(APT_INSTALL) chromium; }; } >/dev/null 2>&1; \
	} || echo "The dashboard's tests are skipped without a browser. Install one: apt-get install chromium"

.PHONY: run
run: $(RUNNABLE) ## Install the server, then serve ./data until Ctrl-C
	@$(BIN)/heapline serve --data $(DATA)

.PHONY: demo
demo: $(RUNNABLE) ## Set up, then show the queue surviving kill -9
	@$(BIN)/heapline demo

.PHONY: lint
lint: $(READY) ## Check lint, formatting, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(READY) ## Fix lint findings and format the code
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

.PHONY: check
check: lint ## Run before every commit: lint and unit tests
	$(PYTEST) $(SPREAD) tests/unit $(NONE_IS_FINE)

.PHONY: test
test: lint browser ## Run what CI runs: lint and all tests except the soak tests; the core's also without the accelerator
	HEAPLINE_ACCELERATOR=off $(PYTEST) $(SPREAD) tests/unit/core tests/unit/journal tests/unit/engine $(NONE_IS_FINE)
	$(PYTEST) $(SPREAD) tests $(NONE_IS_FINE)

.PHONY: soak
soak: $(READY) ## Run the long tests: those marked soak, with Hypothesis' long profile
	$(PYTEST) -m soak --timeout=0 -o faulthandler_timeout=0 --hypothesis-profile=soak tests $(NONE_IS_FINE)

.PHONY: sim
sim: $(READY) ## Run the simulator once: make sim SEED=42
	$(BIN)/python -m tests.simulation.simulate --seed $(SEED)

.PHONY: bench
bench: $(READY) ## Measure the core next to its baselines
	$(BIN)/python -m benchmarks core

.PHONY: bench-quick
bench-quick: $(READY) ## Measure the core in under 45 seconds, on smaller sizes
	$(BIN)/python -m benchmarks core --quick

.PHONY: bench-server
bench-server: $(READY) ## Measure the server next to its peers, which install themselves
	$(BIN)/python -m benchmarks server --peers beanstalkd,redis,postgres,awa,procrastinate,rabbitmq,jetstream

.PHONY: bench-sdk
bench-sdk: $(READY) ## Measure the client, tasks and the import next to their peers
	$(BIN)/python -m benchmarks sdk --peers awa,procrastinate,celery,celery-everysec

.PHONY: bench-streams
bench-streams: $(READY) ## Measure topics as streams: publishing, groups, ten million timers, seeking
	$(BIN)/python -m benchmarks streams

.PHONY: docs-test
docs-test: $(READY) ## Run the code that README and docs show
	$(PYTEST) tests/acceptance/test_docs.py

.PHONY: constraints
constraints: $(READY) ## Pin the installed versions in constraints.txt
	@{ head -n 1 constraints.txt; $(PIP) freeze --exclude-editable | sort -f; } > constraints.new
	@mv constraints.new constraints.txt && touch $(READY)

.PHONY: clean
clean: ## Remove .venv and all generated files
	rm -rf .venv dist build .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/heapline/wire/heapline.binpb src/heapline/_accelerator.abi3.so
	rm -rf src/heapline/dashboard/static/vendor tests/browser/vendor
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
