# Two commands do everything on a fresh machine with Python 3.11 or later: `make run` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
FILES   = pyproject.toml constraints.txt

.PHONY: run test crash-test lint docs clean

# More threads than one gain little here, and suffer on a busy machine: docs/speed.md.
run: $(VENV)/.run                    ## EFC and fine-tuning on the bundled digits, about a minute on a CPU
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/efcil run --output runs

test: $(VENV)/.test lint             ## linter, type checker, tests
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

crash-test: $(VENV)/.test            ## kills and fails `run` and `learn` at every I/O call, some ten minutes
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python tests/crash/harness.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test                  ## what is generated from the code
	$(BIN)/python -m efcil.settings.documentation docs/settings.md

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python $(FILES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/bin/python $(FILES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hub,onnx]'
	touch $@ $(VENV)/.run
