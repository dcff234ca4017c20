# The first use of any target but `gpu` builds .venv; a second use finds it and is instant. `make demo` installs what it
# needs, all other targets the rest as well.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A worker gets neighbouring tests, which share fixtures and warm processes, and takes those of others when it has none.
PYTEST := $(BIN)/python -m pytest --dist worksteal

GDS := $(VENV)/gds
TRANSFORMERS_4 := $(VENV)/transformers4
VERSIONS := $(VENV)/versions

# What is compiled once, tests included, is not compiled again by each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test test-gds docs check versions torture bench gpu wheels clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train, be killed, resume; the first ten saves on this machine, beside torch"
	@echo "make quick     units, golden files, round trips, gradients: what to run while you write"
	@echo "make test      all tests but the long ones"
	@echo "make docs      the site of the documentation, in site/"
	@echo "make check     what has to pass: formatting, lint, types, direction of imports, make docs, make test, and a part"
	@echo "               of the tests with the lowest versions of other packages"
	@echo "make versions  all tests with the lowest and with the newest versions, for each Python here: an hour, one table"
	@echo "make torture   all tests with their long tails: random states, killed processes, fuzzed files"
	@echo "make bench     the figures of docs/figures.md, on this machine"
	@echo "make gpu       all that is worth doing on a GPU, in seven minutes and one table (WHEELS: see make wheels)"
	@echo "make wheels    fill WHEELS for a machine without network"
	@echo "make test-gds  tests of the backend gds alone"
	@echo "make clean     remove .venv and caches"

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	touch $@

$(STAMP): $(DEMO)
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(DEMO)
	$(BIN)/python examples/resume_after_kill.py

quick: $(STAMP)
	$(PYTEST) -n 3 -q -m "not gpu and not torture" $$($(BIN)/python tests/quick.py)

test: $(STAMP)
	-tests/hosts/install.sh
	-tests/filesystems/install.sh
	$(PYTEST) -n 3 -m "not gpu and not torture" --ignore tests/gds
	$(MAKE) test-gds

# In an environment of its own, so that the others find a machine without kvikio. FASTENSOR_TESTS_NEED_GDS=1 makes it an
# error that they cannot be run here.
test-gds: $(STAMP)
	-$(MAKE) --no-print-directory $(GDS)/.installed
	if test -e $(GDS)/.installed; then \
	    LD_LIBRARY_PATH=$(CURDIR)/$(GDS)/driver$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
	    $(GDS)/bin/python -m pytest -n 2 tests/gds; \
	else test -z "$$FASTENSOR_TESTS_NEED_GDS"; fi

$(GDS)/.installed: $(STAMP) tests/gds/install.sh
	tests/gds/install.sh $(VENV) $(GDS)
	touch $@

$(TRANSFORMERS_4)/.installed: $(STAMP) tests/transformers4/install.sh
	tests/transformers4/install.sh $(VENV) $(TRANSFORMERS_4)
	touch $@

# Warnings, such as links that lead nowhere, are errors, but not with --quiet. NO_MKDOCS_2_WARNING leaves an announcement
# out that is no warning of ours.
docs: $(VENV)/.docs
	$(BIN)/python -m doctest docs/docstrings.py docs/repository_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs
	$(MAKE) test
	$(BIN)/python tests/versions/run.py $(VERSIONS) --quick

# VERSIONS_OPTIONS="--only newest-3.13" runs one of them.
versions: $(STAMP)
	-tests/hosts/install.sh
	-tests/filesystems/install.sh
	$(BIN)/python tests/versions/run.py $(VERSIONS) $(VERSIONS_OPTIONS)

# Without the packages, what is written is not read by transformers 4, and the tests say so.
torture: $(STAMP)
	-$(MAKE) --no-print-directory $(TRANSFORMERS_4)/.installed
	-tests/hosts/install.sh
	-tests/filesystems/install.sh
	$(PYTEST) -n 2 -m "not gpu" --hypothesis-profile=torture -o faulthandler_timeout=3600 --ignore tests/gds
	$(MAKE) test-gds

# What benchmarks/loaders.py measures beside Fastensor: a few MB.
$(VENV)/.loaders: $(STAMP)
	$(PIP) --editable '.[loaders]'
	touch $@

bench: $(VENV)/.loaders
	benchmarks/install-fio.sh
	$(BIN)/python benchmarks/new_user.py
	$(BIN)/python benchmarks/first_use.py
	$(BIN)/python benchmarks/small_loads.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/loaders.py
	$(BIN)/python benchmarks/async_checkpoint.py
	-tests/filesystems/install.sh
	$(BIN)/python benchmarks/unchanged.py
	$(BIN)/python benchmarks/tensor_io.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/offload_codecs.py
	$(BIN)/python benchmarks/offload_memory.py
	$(BIN)/python benchmarks/offload_trainers.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/accelerate_state.py
	$(BIN)/python benchmarks/accelerate_inference.py
	$(BIN)/python benchmarks/lmdb_reading.py

# On a machine with a GPU, which needs no network: from the checkout, what is installed there, and a folder of wheels,
# which `make wheels` fills elsewhere.
WHEELS ?= .whl
gpu:
	benchmarks/gpu.sh $(PYTHON) $(WHEELS)

WHEELS_PYTHON ?= 3.12
WHEELS_CUDA ?= 13
wheels:
	benchmarks/wheels.sh $(PYTHON) $(WHEELS) $(WHEELS_PYTHON) $(WHEELS_CUDA)

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .bench
