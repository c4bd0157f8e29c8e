# make demo    a Transformer that trains, translates and is scored, from nothing, in a few minutes
# make test    lint, types and every test that needs no GPU
# Both create .venv with the pinned versions of constraints.txt, once. PYTHON chooses the interpreter (>= 3.10).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
# Relative, so that a space in the project's path never reaches a recipe.
BIN := .venv/bin
DEMO := demo
WORKERS ?= 2
BENCH ?= --quick
OF_OTHER_RUNS := --ignore tests/executed --ignore ptx-check/tests/kernels --ignore-glob 'tests/gpu/test_[!p]*.py'
# Checkouts whose tests `make peers` runs; one that is not named is left out.
FLASH_ATTENTION ?=
LIGER ?=
PYTORCH ?=
TRANSFORMERS ?=

.PHONY: help install demo test lint types tests executed peers format compile-matrix docs oldest dist gpu-check bench clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: .venv/.installed

.venv/.installed: setup.py constraints.txt pretraining/pyproject.toml ptx-check/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "fasttfm needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ptx-check \
		--editable '.[dev]' --editable pretraining
	touch $@

demo: install
	@scripts/demo.sh $(BIN)/fasttfm $(DEMO)

lint: install
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

# Three runs. One to three tests that fail in the first may be a busy machine's: they run once more, alone, and those that
# pass then are named as unsteady. It does not collect what others run: the tests of a GPU (make gpu-check), and what the
# second run does. That one executes a part of the kernels' PTX, for which Triton must not be in its interpreter; the
# third takes tests whose numbers the processor decides, as on one that has less than this one, each day the next. All
# three run, and one that fails fails it. Tests marked in_turn run a part of their cases each day, all of them with
# FASTTFM_TEST_DAY=every.
tests: install
	@status=0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 20 $(OF_OTHER_RUNS) || \
		status=$$?  # a core each
	if [ $$status = 1 ]; then status=0; OMP_NUM_THREADS=1 $(BIN)/python -m tests.again || status=$$?; fi
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/executed \
		ptx-check/tests/kernels || status=$$?
	if [ "$$(uname -m)" = x86_64 ]; then $(BIN)/python -m tests.processors --in-turn --workers $(WORKERS) || status=$$?; fi
	exit $$status

# mypy takes one core for a minute or more: the tests take the others meanwhile.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types tests

# The numeric tests on every processor that this one can stand for, with a record.
processors: install
	@$(BIN)/python -m tests.processors --workers $(WORKERS)

# The PTX of every kernel executed on a CPU, for every chip and dtype, and mutations of it, recorded; no GPU needed.
executed: install
	@$(BIN)/python -m tests.executed --workers $(WORKERS)

# make peers FLASH_ATTENTION=DIR LIGER=DIR PYTORCH=DIR TRANSFORMERS=DIR    their own tests with fasttfm in their place
peers: install
	@status=0
	$(BIN)/python -m tests.peer_tests $(if $(FLASH_ATTENTION),--flash-attention "$(FLASH_ATTENTION)") \
		$(if $(LIGER),--liger "$(LIGER)") $(if $(PYTORCH),--pytorch "$(PYTORCH)") || status=$$?
	$(BIN)/python -m tests.registry $(if $(TRANSFORMERS),--transformers "$(TRANSFORMERS)") || status=$$?
	exit $$status

format: install
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest versions that setup.py allows, in an environment of their own; downloads some gigabytes.
oldest: install
	@scripts/oldest.sh $(BIN)/python

# Every kernel and tile for every chip, held against kernels/proof/budgets.csv; takes long, no GPU needed.
compile-matrix: install
	@$(BIN)/python -m fasttfm.kernels.proof.matrix --report

# The documentation in build/site, warnings as errors, every link inside it followed.
docs: install
	@$(BIN)/python scripts/docs.py

# The wheel and the source distribution in dist/, tried in an environment of its own outside the checkout.
dist: install
	@scripts/dist.sh $(BIN)/python

# On a machine with a GPU: the tests that need one, the sanitizer where present, then timings into benchmarks/results.
gpu-check: install
	@scripts/gpu_check.sh $(BIN)/python

# Every benchmark beside its peers, minutes; `make bench BENCH="--full kernels"` for a record to publish.
bench: install
	@$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv build *.egg-info {pretraining,ptx-check}/build {pretraining,ptx-check}/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
