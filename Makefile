# The first use of any target builds .venv; a second use finds it and is instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check torture bench gpu clean
.DEFAULT_GOAL := check

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,lightning]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/resume_after_kill.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not gpu and not torture"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

torture: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not gpu" --hypothesis-profile=torture

bench: $(STAMP)
	benchmarks/install-fio.sh
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/async_checkpoint.py
	$(BIN)/python benchmarks/tensor_io.py

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs
	$(BIN)/python benchmarks/checkpoint.py --device cuda --models gpt2_adam --output benchmarks/results/gpu

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .bench
