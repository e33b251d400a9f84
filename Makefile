# Two commands do everything on a fresh machine with Python 3.11 or later: `make run` and `make test`.
# Others: `make docs` builds the site, `make test-lowest` tests with the lowest declared versions.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
FILES   = pyproject.toml constraints.txt
# Old CPU builds of torch are not to be had everywhere, and a CUDA build brings its own triton; so both are left out:
# `make test-lowest TORCH=torch==2.11.0` asks for the lowest torch.
LOWEST ?= .venv-lowest
TORCH  ?= $(shell grep '^torch==' constraints.txt)
LEAVE_OUT = torch triton
# Ray and submitit have an environment of their own: the other tests do without them.
CLUSTERS ?= .venv-clusters
# So have timm and torchvision.
TIMM ?= .venv-timm

.PHONY: run test test-browser test-clusters test-timm test-lowest crash-test lint docs clean

# More threads than one gain little here, and suffer on a busy machine: docs/speed.md.
run: $(VENV)/.run                    ## EFC and fine-tuning on the bundled digits, about a minute on a CPU
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/efcil run --output runs

test: $(VENV)/.test lint             ## linter, type checker, tests
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-browser: $(VENV)/.test          ## the pages of `efcil serve` and `efcil report` in headless Chromium; needs chromium and chromedriver
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/serve/test_browser.py tests/report/test_report_browser.py

test-clusters: $(CLUSTERS)/.test     ## grids on a local Ray cluster and through submitit, some ten minutes
	EFCIL_TEST_CLUSTERS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(CLUSTERS)/bin/python -m pytest -rs tests/clusters

test-timm: $(TIMM)/.test             ## networks of the real timm, with random weights; a minute
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(TIMM)/bin/python -m pytest -rs tests/outside

crash-test: $(VENV)/.test            ## kills and fails `run` and `learn` at every I/O call, some fifteen minutes
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python tests/crash/harness.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-lowest:                         ## tests with the lowest versions that pyproject.toml declares
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) tools/lowest.py --leave-out $(LEAVE_OUT) > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt \
	    '$(TORCH)' -e '.[dev,hub,onnx,pretrained,serve,heic,completion,figures,tensorboard,wandb,mlflow]'
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n auto

docs: $(VENV)/.docs                  ## pages that are made from the code (settings, storage), then the site, in site/
	$(BIN)/python -m efcil.resolution.documentation docs/settings.md
	$(BIN)/python -m efcil.resolution.storage docs/storage.md
	$(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) $(LOWEST) $(CLUSTERS) $(TIMM) site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python $(FILES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/bin/python $(FILES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hub,onnx,pretrained,serve,heic,completion,figures,tensorboard,wandb,mlflow]'
	touch $@ $(VENV)/.run

$(CLUSTERS)/.test: $(FILES)
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,slurm]'
	touch $@

$(TIMM)/.test: $(FILES)
	$(PYTHON) -m venv $(TIMM)
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hub,onnx]' timm
	touch $@

$(VENV)/.docs: $(VENV)/bin/python $(FILES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@ $(VENV)/.run
