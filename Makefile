# make demo    a Transformer that trains, translates and is scored, from nothing, in a few minutes
# make test    lint, types and the tests that need no GPU, a fixed part of their cases; make test-all: every case
# They create .venv with the pinned versions of constraints.txt, once: make demo installs what it needs, some 400 MB beside
# PyTorch, make test the rest. PYTHON chooses the interpreter (>= 3.10), TORCH_INDEX another index for PyTorch.

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
SECONDS_OF_GPU ?= 3600
# Checkouts whose tests `make peers` runs; one that is not named is left out.
FLASH_ATTENTION ?=
LIGER ?=
CHROMIUM ?= chromium
# Updates of README's training that `make dist` types; 1400 is the whole of it.
UPDATES ?= 40
# Folder of Multi30k's train, valid and test files, where `fasttfm prepare --dataset multi30k` leaves them.
TEXT ?= data/multi30k

.PHONY: help install demo test test-all lint types tests executed peers format compile-matrix docs pictures oldest newest dist asset gpu-check bench clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: .venv/.installed

# A line a package: minutes pass where they must be downloaded.
PIP = PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
SAY = | sed -un 's/^Collecting \([^ ]*\).*/make:     \1/p'

.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "fasttfm needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12")'
	echo "make: an environment in .venv"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	echo "make: PyTorch, most of the download"
	$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch $(SAY)
	touch $@

.venv/.demo: .venv/.torch setup.py constraints.txt
	@echo "make: fasttfm and what the demo needs"
	$(PIP) --editable '.[cpu,plots]' $(SAY)
	touch $@

.venv/.installed: .venv/.torch setup.py constraints.txt pretraining/pyproject.toml ptx-check/pyproject.toml
	@echo "make: the packages of all extras, tests and tools"
	$(PIP) --editable ptx-check --editable '.[dev]' --editable pretraining $(SAY)
	touch $@ .venv/.demo

demo: .venv/.demo
	@scripts/demo.sh $(BIN)/fasttfm $(DEMO)

lint: install
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

# A fixed part of the cases (the marks sample and whole), in two runs: tests/suite.py.
tests: install
	@$(BIN)/python -m tests.suite --workers $(WORKERS)

# One of the two. The second is short: a worker more would cost it a twentieth of its time in imports.
gate-executed: WORKERS = 1
gate-%: install
	@$(BIN)/python -m tests.suite --run $* --workers $(WORKERS)

# At once: while a test waits for a process that it has started, mypy and the other run take its core.
test: lint
	@$(MAKE) --no-print-directory --jobs 3 types gate-tests gate-executed

# Every case, on every processor that this one can stand for, with a record; hours.
test-all: lint types
	@$(BIN)/python -m tests.suite --all --workers $(WORKERS)

# The numeric tests on every processor that this one can stand for, with a record.
processors: install
	@$(BIN)/python -m tests.processors --workers $(WORKERS)

# The PTX of every kernel executed on a CPU, for every chip and dtype, and mutations of it, recorded; no GPU needed.
executed: install
	@$(BIN)/python -m tests.executed --workers $(WORKERS)

# make asset TEXT=DIR    dist/multi30k-en-de.zip: a small trained model for a release, in 20 minutes of two cores
asset: install
	@$(BIN)/python -m benchmarks end_to_end multi30k-fast --text "$(TEXT)" --work build/asset --results build/asset
	$(BIN)/python scripts/model_asset.py build/asset/model dist/multi30k-en-de.zip \
		--record build/asset/end-to-end-multi30k-fast.jsonl \
		--data "Multi30k, task 1 (captions of Flickr30K: for non-commercial research and education)"
	echo "A dog runs over the grass." | $(BIN)/fasttfm translate dist/multi30k-en-de.zip

# make peers FLASH_ATTENTION=DIR LIGER=DIR    their own tests, and the installed torch's, with fasttfm in their place
peers: install
	@status=0
	$(BIN)/python -m tests.peer_tests $(if $(FLASH_ATTENTION),--flash-attention "$(FLASH_ATTENTION)") \
		$(if $(LIGER),--liger "$(LIGER)") || status=$$?
	$(BIN)/python -m tests.registry || status=$$?
	exit $$status

format: install
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest versions that setup.py allows, in an environment of their own; downloads some gigabytes.
oldest: install
	@scripts/oldest.sh $(BIN)/python

# The newest versions of all that is installed, without pins, in an environment of their own; downloads some gigabytes.
newest: install
	@WORKERS=$(WORKERS) scripts/newest.sh $(BIN)/python

# Every kernel and tile for every chip, held against kernels/proof/budgets.csv; takes long, no GPU needed.
compile-matrix: install
	@$(BIN)/python -m fasttfm.kernels.proof.matrix --report

# The documentation in build/site, warnings as errors: a link that leads nowhere is one.
docs: install
	@$(BIN)/mkdocs build

# docs/images: charts from the records, the demo's curve and attention, and the site's first page at 1280 and 390 pixels.
pictures: docs demo
	@$(BIN)/python -m benchmarks report --readme
	cp $(DEMO)/attention.png docs/images/demo-attention.png
	cp $(DEMO)/model/curve.png docs/images/demo-curve.png
	scripts/screenshots.sh $(CHROMIUM)

# The wheel and the source distribution in dist/, tried in an environment of its own; README's words typed there.
dist: install
	@scripts/dist.sh $(BIN)/python $(UPDATES)

# On a machine with a GPU: every question of the device queue, the tests that need one among them (docs/device-queue.md).
gpu-check: install
	@$(BIN)/python -m benchmarks queue --seconds $(SECONDS_OF_GPU)

# Every benchmark beside its peers, minutes; `make bench BENCH="--full kernels"` for a record to publish.
bench: install
	@$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv build *.egg-info {pretraining,ptx-check}/build {pretraining,ptx-check}/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
