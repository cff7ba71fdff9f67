PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= plots
RUN_DIR ?= runs/quickstart
TIMES ?= 20

BIN := $(VENV)/bin
# Progress bars help a person and only lengthen the log of an automatic run.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),--quiet) -c constraints.txt
CREATED := $(VENV)/.created
FOR_USE := $(VENV)/.installed-$(EXTRAS)
FOR_TESTS := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint types campaigns chaos gpu clean

help:
	@echo 'make quickstart   set up $(VENV), then train a small model on real text (minutes, two CPU cores)'
	@echo 'make test         set up $(VENV), then lint, types and all tests'
	@echo 'make install      set up $(VENV) only'
	@echo 'make lint         ruff: rules and formatting'
	@echo 'make types        mypy'
	@echo 'make campaigns    the long test runs'
	@echo 'make chaos        the fault campaign: ranks killed, disks filled, files damaged, TIMES=$(TIMES) each'
	@echo 'make gpu          GPU tests and smoke checks with $(PYTHON) and its own torch (CUDA and Triton)'
	@echo 'make clean        remove $(VENV), builds and caches'
	@echo
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  EXTRAS=$(EXTRAS) (comma-separated extras of install and quickstart)'

$(CREATED):
	@command -v $(PYTHON) >/dev/null || { echo 'No $(PYTHON) found; name a Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Mamba-3-Lite needs Python 3.11 or newer, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing (Debian and Ubuntu: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(FOR_USE): pyproject.toml constraints.txt | $(CREATED)
	$(PIP_INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

# A CUDA build of torch brings Triton; a CPU build does not, and the interpreted kernel tests need it.
$(FOR_TESTS): pyproject.toml constraints.txt | $(CREATED)
	$(PIP_INSTALL) -e '.[test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || { set -x; $(PIP_INSTALL) -e '.[test,interp]'; }
	@touch $@

install: $(FOR_USE)

quickstart: $(FOR_USE)
	$(BIN)/mamba3-lite quickstart --run-dir $(RUN_DIR)

lint: $(FOR_TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_TESTS)
	$(BIN)/mypy mamba3_lite

# One thread in each of the two test processes: more only makes two cores fight.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

campaigns: $(FOR_TESTS)
	$(BIN)/python -m pytest -m campaign

chaos: $(FOR_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --times $(TIMES)

# No virtual environment: a GPU machine has the torch that fits its driver.
gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu needs a CUDA device; torch %s of $(PYTHON) sees none" % torch.__version__)'
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest tests/gpu
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) tests/e2e_gpu_smoke.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@test ! -e $(CREATED) || { set -x; rm -rf $(VENV); }
