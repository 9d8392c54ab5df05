# Two commands: `make run` serves, `make test` proves. MODEL= takes a directory or a hub id.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STARTED := $(shell date +%s)
ifdef MODEL
export KVR_MODEL := $(MODEL)
endif

# what opt-in tests have measured is kept there, as in EVIDENCE=docs/evidence
ifdef EVIDENCE
export KVR_TEST_EVIDENCE := $(EVIDENCE)
endif

ATOM := .venv-atom
RNGD := .venv-rngd

.PHONY: run test lint bench profile clean env-atom test-atom env-rngd check-rngd \
  .check-rngd validate-models chaos soak chaos-report fuzz

run: $(VENV)/.installed
	@$(BIN)/kvrelay pull
	@exec $(BIN)/kvrelay up -c "$(SCALE)" --since $(STARTED)

test: $(VENV)/.installed-dev
	@KVR_MODEL= $(BIN)/kvrelay pull
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest

env-atom: $(ATOM)/.installed

# the vendor's real code over an emulated chip; the system's tests in the one environment, the device's in the other
test-atom: $(VENV)/.installed-dev $(ATOM)/.installed
	@KVR_MODEL= $(BIN)/kvrelay pull
	$(ATOM)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-atom.txt -e '.[test]'
	$(ATOM)/bin/python -m pytest tests/atom
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m atom tests/acceptance

env-rngd: $(RNGD)/.installed

# opt-in: gigabytes to install, minutes to run. The vendor's real compiler imports every graph and runs it on the CPU
check-rngd: $(VENV)/.installed-dev
	@if [ -x $(RNGD)/bin/python ]; then $(MAKE) --no-print-directory .check-rngd; \
	else echo "skipped: no furiosa-torch here; make env-rngd installs it (several GB)"; fi

.check-rngd: $(RNGD)/.installed $(ATOM)/.installed
	$(RNGD)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-rngd.txt -e '.[test]'
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RNGD)/bin/python -m pytest tests/rngd
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m rngd tests/acceptance

# opt-in, hours: kvrelay validate over four models on the CPU, three lengths, and on an emulated ATOM, two
validate-models: $(VENV)/.installed-dev $(ATOM)/.installed
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m evidence -s -q tests/acceptance/test_four_models.py
	$(BIN)/kvrelay validate --merge $(or $(EVIDENCE),build/validation)/validate-cpu-*.json
	$(BIN)/kvrelay validate --merge $(or $(EVIDENCE),build/validation)/validate-atom-*.json

# every fault, by name; several at once, for they wait more than they compute
chaos: $(VENV)/.installed-dev
	@KVR_MODEL= $(BIN)/kvrelay pull
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m chaos -n 3 tests/chaos

soak: $(VENV)/.installed-dev
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m tests.chaos.soak $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

# the table of docs/reliability.md, measured anew; for an idle machine
chaos-report: $(VENV)/.installed-dev
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m tests.chaos.report docs/reliability.md

# twenty minutes of whatever schemathesis thinks of; SECONDS= and SEED= for others
fuzz: $(VENV)/.installed-dev
	KVR_TEST_FUZZ_SECONDS=$(or $(SECONDS),1200) KVR_TEST_FUZZ_SEED=$(or $(SEED),1) PATH="$$PATH:$(CURDIR)/$(BIN)" \
	  $(BIN)/python -m pytest -s -q tests/acceptance/test_openapi.py -k schemathesis

# kvrelay's speed: the suite on the system that runs here, alone or in turns with another server (RIVAL=transformers starts one,
# RIVAL_URL= is one), then what needs systems of its own. For an idle machine
bench: $(VENV)/.installed-dev
	$(BIN)/kvrelay bench --suite --rounds $(or $(ROUNDS),1) $(if $(RIVAL),--rival $(RIVAL)) $(if $(RIVAL_URL),--rival rival=$(RIVAL_URL))
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m pytest -m benchmark -s -q tests/benchmarks

# where time goes, for a job and for a step. For an idle machine, where you may look into your own processes (macOS: as root)
profile: $(VENV)/.installed-dev
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python -m tests.benchmarks.profiler

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files -z ':!docs/evidence/*.json' | xargs -0 $(BIN)/detect-secrets-hook --baseline .secrets.baseline

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,redis]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,redis,dev]'
	@touch $@ $(VENV)/.installed

# the last one without its pins: see deploy/requirements-atom.txt
$(ATOM)/.installed: pyproject.toml deploy/requirements-atom.txt deploy/constraints-atom.txt
	$(PYTHON) -m venv $(ATOM)
	$(ATOM)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-atom.txt \
	  -r deploy/requirements-atom.txt -e .
	$(ATOM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps optimum-rbln==0.12.0
	@touch $@

$(RNGD)/.installed: pyproject.toml deploy/requirements-rngd.txt deploy/constraints-rngd.txt
	$(PYTHON) -m venv $(RNGD)
	$(RNGD)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints-rngd.txt \
	  -r deploy/requirements-rngd.txt -e .
	@touch $@

clean:
	rm -rf $(VENV) $(ATOM) $(RNGD) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
