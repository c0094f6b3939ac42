# Everything installs itself into .venv; `make` alone says what there is.
# Another Python: make test PYTHON=python3.13

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
# How many processes share the tests; each starts servers and a Spark of its own.
TEST_PROCESSES ?= 2
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
BUILD_INPUTS := pyproject.toml constraints.txt $(wildcard setup.py) $(wildcard src/tidelog/*/*.[ch])

# One virtual environment is shared by all targets, so two of them must not install into it at once.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint check bench clean java-for-spark

help:
	@echo 'make demo    append, crash, ship to a bucket, lose a disk and restore it, in a minute'
	@echo 'make test    all tests; those of Spark need Java 17 or newer'
	@echo 'make lint    format, lint, types and import directions'
	@echo 'make check   lint, then test: what CI runs'
	@echo 'make bench   the benchmarks, each against its peers'
	@echo 'make clean   remove everything that was built'

demo: $(VENV)/.ready-demo
	@$(BIN)/tidelog demo

test: java-for-spark $(VENV)/.ready-development
	@$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal tests

lint: $(VENV)/.ready-development
	@$(BIN)/ruff format --quiet --diff .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

check: lint test

bench: java-for-spark $(VENV)/.ready-bench
	@$(BIN)/python bench/run.py

# Before anything is installed. The demo does without, and says what it left out.
java-for-spark:
	@scripts/check-java 'make $(MAKECMDGOALS)'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info tidelog-demo
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -type f -delete

$(VENV)/.created: | scripts/make-venv
	@PYTHON='$(PYTHON)' scripts/make-venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@touch $@

# What each of them needs on top of the package itself. The package is installed in place, and its kernel is built by
# the setuptools that constraints.txt pins.
$(VENV)/.ready-demo: EXTRAS := cli,dev-s3,spark
$(VENV)/.ready-development: EXTRAS := cli,test,dev
$(VENV)/.ready-bench: EXTRAS := cli,test,bench

$(VENV)/.ready-%: $(VENV)/.created $(BUILD_INPUTS)
	@echo 'installing tidelog[$(EXTRAS)] into $(VENV)'
	@$(PIP) install --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python scripts/report-kernel.py
	@touch $@ $(VENV)/.ready-demo
