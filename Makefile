# Everything runs in .venv, which these targets make themselves; Python, pip and make are enough.
PYTHON ?= python3
BIN := .venv/bin

# Compiled modules are kept: without them every start costs many seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage lint slow flower docs clean

demo: .venv/.core  ## training alone and together on emoji, every style unseen once; prints tables and a page's path
	$(BIN)/feddg demo

test: .venv/.dev  ## the default test suite, up to four processes of a thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

coverage: .venv/.dev  ## the same, with the share of lines that the tests reach, by file
	$(BIN)/uv pip install --quiet --python $(BIN)/python pytest-cov
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --cov --cov-report term

slow: .venv/.dev  ## experiments and deployments that take minutes
	$(BIN)/python -m pytest -m slow

flower: $(BIN)/uv  ## what uses Flower, real deployments too, on each version of it that pyproject.toml admits
	for version in 1.41 1.42; do \
	  env=.venv/flower-$$version; \
	  $(BIN)/uv venv --quiet --clear $$env && \
	  $(BIN)/uv pip install --quiet --python $$env/bin/python -e ".[dev,flower]" "flwr==$$version.*" && \
	  $$env/bin/python -m pytest -m "slow or not slow" tests/deploy tests/cli/test_deploy.py \
	    tests/test_containers.py tests/privacy/test_masked_rounds.py tests/security || exit 1; \
	done

lint: .venv/.dev  ## style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/.docs  ## the documentation site, in site/; a warning is an error
	$(BIN)/mkdocs build --strict

$(BIN)/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv

.venv/.core: pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e .
	touch $@

.venv/.dev: pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[dev,flower]"
	touch $@ .venv/.core

.venv/.docs: pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[docs]"
	touch $@ .venv/.core

clean:
	rm -rf .venv
