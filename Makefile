# make test works on a fresh machine with Python 3.11 or newer: it makes .venv, installs one known-good set, runs all tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint types format bench clean

test: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/decoding.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
