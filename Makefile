# `make demo` and `make test` set everything up in .venv the first time and go straight to work after that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base-ready
READY := $(VENV)/.ready

.PHONY: setup demo demo-text test test-slow test-deployment lint format stubs bench fuzz kill clean

setup: $(READY)

# What a user installs: enough for `make demo`.
$(BASE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# What tests, checks and benchmarks need beside it.
$(READY): $(BASE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(BASE)
	$(BIN)/fedveil audit --config examples/demo.toml

demo-text: $(BASE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[text]'
	$(BIN)/fedveil audit --config examples/text.toml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes with one thread each beat one process with two on small models.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not deployment"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Real servers and nodes on this machine: among them a SuperLink and four SuperNodes, with nearly everything going wrong.
test-deployment: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m deployment tests

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What type checkers read of `fedveil.defenses` and `fedveil.attacks`, after a method was added.
stubs: $(READY)
	$(BIN)/python -c "from fedveil.registry import write_stubs; write_stubs()"

bench: $(READY)
	$(BIN)/python -m benchmarks

# Twenty-four thousand damaged and hostile files; `make fuzz FUZZ="--seed 1"` makes others, FUZZ="--files 100000" more.
fuzz: $(READY)
	$(BIN)/python -m fuzz $(FUZZ)

# Two hundred kills of runs that are resumed afterwards; `make kill KILL="--seed 1"` kills them elsewhere.
kill: $(READY)
	$(BIN)/python -m kill $(KILL)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
