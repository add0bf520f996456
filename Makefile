# `make chat`: venv, install, run. `make test`: venv, install with the test extra, pytest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: chat install test test-slow lint bench gpu-check clean

chat: $(VENV)/.installed
	@$(BIN)/chatkv

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -m chatkv.kernels.cpu.native
	@touch $@

$(VENV)/.installed-test: pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.installed

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/types/chatkv
	@for root in app engine kernels assets; do ln -sfn ../../../$$root build/types/chatkv/$$root; done
	MYPYPATH=build/types $(BIN)/mypy -p chatkv.app -p chatkv.engine -p chatkv.kernels
	$(BIN)/lint-imports

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.bench

# Whatever is installed: it needs torch with CUDA and triton, and works in a checkout.
gpu-check:
	$(PYTHON) app/gpu_check

clean:
	rm -rf $(VENV) build
