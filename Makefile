# Everything installs itself into .venv; `make` alone says what there is.
# Another Python: make test PYTHON=python3.13

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
# How many processes share the tests; each starts servers and a Spark of its own.
TEST_PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest -q -n $(TEST_PROCESSES)
# How long `make test-long` goes on starting tests (the next run begins with those that are left), and the seed of an
# earlier run whose choices it makes again. Without a limit the misfortunes of the cluster go on for half an hour.
MINUTES ?=
SEED ?=
# What `make test-quick` runs: the parts that everything else stands on, without property tests.
QUICK_TESTS := $(addprefix tests/,log store staging cold topics test_config.py test_mutations.py test_style.py test_units.py)
# Tests start hundreds of Pythons, and without bytecode each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
BUILD_INPUTS := pyproject.toml constraints.txt $(wildcard setup.py) $(wildcard src/tidelog/native/*.[ch]) \
	$(addprefix scripts/kafka_codec/,generate.py messages.txt)

# One virtual environment is shared by all targets, so two of them must not install into it at once.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help wheel demo test test-quick test-long test-clients mutations lint check bench bench-full guard clean java-for-spark

help:
	@echo 'make demo        append, crash, ship to a bucket, lose a disk and restore it, serve it, in a minute'
	@echo 'make test-quick  log, cold tier and topics without servers and property tests: what to run while working'
	@echo 'make test        every feature, the same way every time; the tests of Spark need Java 17 or newer'
	@echo 'make test-long   the campaigns: more examples, every cut, kills; MINUTES=30 stops, and goes on there next time'
	@echo 'make test-clients  clients of Kafka in Java, Go, JavaScript and C, and a real Kafka to compare with'
	@echo 'make mutations   break the code on purpose, and see whether the tests notice it (a quarter of an hour or more)'
	@echo 'make lint        format, lint, types and import directions'
	@echo 'make check       lint, then test: what must pass before a commit'
	@echo 'make wheel       build dist/tidelog-*.whl, with the C extension: for machines without a compiler'
	@echo 'make bench       the benchmarks, each beside its peers, in a few minutes'
	@echo 'make bench-full  the same at full size, an hour at most, and docs/benchmarks.md from it; again: what is left'
	@echo 'make guard       instructions of what every message goes through, and how often it waits: 15 % more fails'
	@echo 'make clean       remove everything that was built'

demo: $(VENV)/.ready-demo
	@$(BIN)/tidelog demo --serve

test: java-for-spark $(VENV)/.ready-development
	@$(PYTEST) --dist worksteal tests

test-quick: $(VENV)/.ready-development
	@$(PYTEST) --dist worksteal -m 'not long and not server and not deeper' $(QUICK_TESTS)

# One test at a time is handed out, so that they run in the order in which they should.
test-long: java-for-spark $(VENV)/.ready-development
	@HYPOTHESIS_PROFILE=deep CHAOS_DIR=$${CHAOS_DIR:-build/chaos} \
		$(if $(MINUTES),CAMPAIGN_MINUTES=$(MINUTES),CHAOS_MINUTES=$${CHAOS_MINUTES:-30}) $(if $(SEED),CAMPAIGN_SEED=$(SEED)) \
		$(PYTEST) --dist load --maxschedchunk 1 -m 'long or deeper' tests

# Needs mvn, go, node and kcat: what each lacks, its test says.
test-clients: java-for-spark $(VENV)/.ready-development
	@$(BIN)/python -m pytest -q -m foreign tests/clients/foreign

mutations: java-for-spark $(VENV)/.ready-development
	@$(BIN)/python scripts/run-mutations

lint: $(VENV)/.ready-development
	@$(BIN)/ruff format --quiet --diff .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

check: lint test

bench: java-for-spark $(VENV)/.ready-bench
	@$(BIN)/python bench/run.py --scale 0.1 --dir build/bench --out build/bench/small.json

# Nothing begins after 50 minutes; sections take turns, and the next call begins with what is left, then what is oldest.
# docs/benchmarks.md says what failed.
bench-full: java-for-spark $(VENV)/.ready-bench
	@$(BIN)/python bench/run.py --scale 1 --keep --minutes 50 --dir build/bench; status=$$?; \
		$(BIN)/python bench/page.py && exit $$status

# Counts with valgrind, which a busy machine does not change. `bench/guard.py --write` writes down what may be.
guard: $(VENV)/.ready-development
	@$(BIN)/python bench/guard.py

# What is in dist/ afterwards is one wheel, for this Python and this kind of machine.
wheel: $(VENV)/.created
	@rm -rf dist
	@$(PIP) wheel --no-build-isolation --no-deps -c constraints.txt --wheel-dir dist .
	@ls dist/*.whl

# Before anything is installed. The demo does without, and says what it left out.
java-for-spark:
	@scripts/check-java 'make $(MAKECMDGOALS)'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info tidelog-demo
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -type f -delete
	rm -f src/tidelog/service/kafka/wire/api_*.py

$(VENV)/.created: | scripts/make-venv
	@PYTHON='$(PYTHON)' scripts/make-venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@touch $@

# What each of them needs on top of the package itself. The package is installed in place, and its extension is built by
# the setuptools that constraints.txt pins.
$(VENV)/.ready-demo: EXTRAS := demo,spark
$(VENV)/.ready-development: EXTRAS := cli,test,dev,bench
$(VENV)/.ready-bench: EXTRAS := cli,test,bench

$(VENV)/.ready-%: $(VENV)/.created $(BUILD_INPUTS)
	@echo 'installing tidelog[$(EXTRAS)] into $(VENV)'
	@$(PIP) install --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@ $(VENV)/.ready-demo
