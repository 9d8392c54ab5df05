# Two commands: `make run` serves, `make test` proves. MODEL= takes a directory or a hub id.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STARTED := $(shell date +%s)
ifdef MODEL
export KVR_MODEL := $(MODEL)
endif

.PHONY: run test lint bench clean

run: $(VENV)/.installed
	@$(BIN)/kvrelay pull
	@exec $(BIN)/kvrelay up -c "$(SCALE)" --since $(STARTED)

test: $(VENV)/.installed-dev
	@KVR_MODEL= $(BIN)/kvrelay pull
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest

bench: $(VENV)/.installed-dev
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m benchmark -s -q tests/benchmarks

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --baseline .secrets.baseline

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,redis]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,redis,dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
