VENV := .venv
PYTHON := $(VENV)/bin/python
TESTS := $(PYTHON) -m pytest -q -n 2 --dist loadscope --max-worker-restart 0
PLAN_VENV := .venv-plan
LINT_VENV := .venv-lint
export PYTHONDONTWRITEBYTECODE :=  # Otherwise each process of each test compiles all modules again.

.PHONY: demo test test-all gpu soak lint test-plan test-package test-processors docs bench clean

demo: $(VENV)/.ready  ## Train a partitioned, pipelined AmoebaNet-D on handwritten digits.
	$(VENV)/bin/gpipe train digits --plan auto

test: $(VENV)/.ready  ## Run all tests, slow ones on some of their cases: at most 6 minutes on two idle cores.
	$(TESTS)

test-all: $(VENV)/.ready $(VENV)/.engines  ## Run all cases of all tests, also those with Ray and trl.
	$(TESTS) --all-cases

gpu: $(VENV)/.ready  ## Test on an accelerator and write one page; PART='bits memory' selects parts, QUICK=1 runs less of each.
	$(VENV)/bin/gpipe doctor --gpu --out out/gpu $(if $(PART),--part $(PART)) $(if $(QUICK),--quick)

soak: $(VENV)/.ready  ## Compare thousands of drawn networks with the reference loop: about an hour.
	$(PYTHON) -m tests.soak.run --configurations 6000 --minutes 60 --workers 2 --out tests/soak/results/soak

lint: $(VENV)/.ready $(LINT_VENV)/.ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(PYTHON)
	$(VENV)/bin/lint-imports --no-cache
	$(PYTHON) tools/prose_lint.py
	$(LINT_VENV)/bin/codespell README.md CONTRIBUTING.md CHANGELOG.md docs src tools
	$(LINT_VENV)/bin/pydoclint src/gpipe

# `gpipe.schedule` and `gpipe.planner.search` must import and pass their tests where torch is not installed.
test-plan: $(PLAN_VENV)/.ready
	$(PLAN_VENV)/bin/python -c "import importlib.util as u; assert u.find_spec('torch') is None"
	$(PLAN_VENV)/bin/python -m pytest -q tests/schedule tests/planner/search src/gpipe/schedule src/gpipe/planner/search

test-package: $(VENV)/.ready  ## Build sdist and wheel, and run the code and commands of README from the wheel: a minute.
	$(PYTHON) -m pytest -q -m package tests/package

test-processors: $(VENV)/.ready  ## Compare results on simulated processors of AMD and Intel, if qemu-x86_64 is installed.
	$(PYTHON) -m tests.processors

docs: $(VENV)/.docs  ## Build the documentation: docs/_build/index.html.
	$(VENV)/bin/sphinx-build -q -W --keep-going -E -b html docs docs/_build

bench: $(VENV)/.bench  ## Measure what a step costs, beside other runtimes: about 40 minutes (python -m bench lists more).
	$(PYTHON) -m bench.run
	$(PYTHON) -m bench.table2
	$(PYTHON) -m bench.memory
	$(PYTHON) -m bench.checkpoint
	$(PYTHON) -m bench.plot

bench-%: $(VENV)/.bench  ## One workload: bench-transformer, bench-conv, ...
	$(PYTHON) -m bench.run $*

# What the pages need alone: torch, which takes long where it is not there yet, and Sphinx.
$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.engines: $(VENV)/.ready
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,trl]'
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(PLAN_VENV)/.ready: pyproject.toml
	test -x $(PLAN_VENV)/bin/python || python3 -m venv $(PLAN_VENV)
	$(PLAN_VENV)/bin/pip install --quiet --disable-pip-version-check numpy pytest hypothesis
	$(PLAN_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# pydoclint needs a fork of docstring_parser, which would replace the package that the command line needs.
$(LINT_VENV)/.ready: constraints.txt
	test -x $(LINT_VENV)/bin/python || python3 -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt codespell pydoclint
	touch $@

clean:
	rm -rf $(VENV) $(PLAN_VENV) $(LINT_VENV) docs/_build docs/_generated
