# make run     install Stairs, fetch the default model, watch it work, then serve it until Ctrl-C
# make test    run the tests          make check   format, lint, types, import rules
# make bench   measure this machine   make coverage  the tests, and the lines they reach
# make quotes  quote anew in the docs what our commands print
# make test-kernels  the GPU kernels in an interpreter and compiled for every card, without a GPU
# make test-newest   Gluon's kernels compiled by the newest Triton, which is put beside the tested one
# make test-gpu      the tests that need a GPU; the result goes to bench/records
# make clean   remove .venv and every cache
#
# Needs Python >= 3.11 and nothing else. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := pyproject.toml constraints.txt scripts/install.py

.PHONY: run test test-kernels test-newest test-gpu coverage check bench quotes clean

run: .venv/.run
	@$(BIN)/stairs pull
	@$(BIN)/python examples/shared_prompt.py
	@$(BIN)/stairs serve smollm2

# Two processes of one thread each: threads of both would wait for one another at each small product.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Processes of their own: Triton's interpreter replaces its compiler for all of them.
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) -n 2 tests/attention/test_interpreted.py

# Dealt one by one to both processes, not a file to each: a kernel takes seconds to compile.
BUILDS := tests/attention/test_gluon_builds.py tests/attention/test_hopper_decode_builds.py
OTHERS := $(addprefix --ignore=,$(BUILDS))

test: .venv/.dev
	$(PYTEST) -n 2 --dist loadscope $(or $(TESTS),$(OTHERS))
	$(if $(TESTS),,$(PYTEST) -n 2 $(BUILDS))
	$(if $(TESTS),,$(INTERPRETED))

test-kernels: .venv/.dev
	STAIRS_ALL_KERNELS=1 $(BIN)/python -m pytest -n auto $(BUILDS) tests/attention/test_kernel_builds.py

test-newest: .venv/.newest
	PYTHONPATH=.venv/newest $(PYTEST) -n 2 -k test_build $(BUILDS)

test-gpu: .venv/.dev
	$(BIN)/python bench/gpu_tests.py

coverage: .venv/.dev
	$(PYTEST) -n 2 --dist loadscope $(OTHERS) --cov --cov-report= --cov-fail-under=0
	$(INTERPRETED) --cov --cov-append

check: .venv/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command as lint; lint()'

bench: .venv/.run
	@$(BIN)/python bench/first_token.py
	@$(BIN)/python bench/step_time.py
	@$(BIN)/python bench/attention.py --cpu

# Runs what the documents quote again, and puts the new output into them.
quotes: .venv/.run
	@$(BIN)/python bench/quoted.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build

.venv/.run .venv/.dev: $(INSTALL)
	@$(PYTHON) scripts/install.py $(subst .venv/.,,$@)
	@touch $@

.venv/.newest: Makefile .venv/.dev
	$(BIN)/python -m pip install --disable-pip-version-check --upgrade --no-deps --target .venv/newest triton==3.9.0
	@touch $@
