# Every target makes what it needs; `make` alone shows them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Some tests wait for processes to start: three files at a time. A file is for one process.
TOGETHER := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Every process of a test would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tests long quick lint check format bench docs clean

help:  ## show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("flray needs Python >= 3.11, got " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## set up and run the default experiment on embedded data
	$(BIN)/flray run

test: $(STAMP)  ## set up, check and run all tests that need no GPU
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(STAMP)
	$(BIN)/pytest -m 'not gpu and not long' $(TOGETHER)

long: $(STAMP)  ## the tests that `make test` leaves out for their length
	$(BIN)/pytest -m long

quick: $(STAMP)  ## the tests without whole runs, in less than a minute
	$(BIN)/pytest -m 'not gpu and not slow and not long' --numprocesses 2 --dist loadfile

lint: $(STAMP)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint  ## the same and import directions
	$(BIN)/pytest tests/test_layering.py

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## how fast the engines are on this machine
	$(BIN)/python benchmarks/engines.py

docs: $(STAMP)  ## build the documentation strictly into build/site
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
