# Everything happens in .venv, made on first use; PYTHON chooses the interpreter (3.11 to 3.13).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint format docs benchmark clean

# The main job on the data set in the package; ARGS takes the options of `smallvit train`.
train: .venv/installed
	$(BIN)/smallvit train $(ARGS)

test: .venv/installed-dev
	$(BIN)/pytest

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pages of docs/ as a site, in site/.
docs: .venv/installed-docs
	$(BIN)/mkdocs build

# The peers live in an environment of their own, with torch.
benchmark: .venv-peers/installed
	.venv-peers/bin/python -m benchmarks.peers

# What training needs, what the tests need besides, and what the site needs: each has a marker of its own.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

# Without its dependencies, jax2onnx installs beside the current orbax-checkpoint, of which it wants an old version but
# needs none; `dev` has what it does need.
.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps 'jax2onnx>=0.17'
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

.venv-peers/installed: pyproject.toml benchmarks/requirements.txt benchmarks/requirements-no-deps.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --requirement benchmarks/requirements.txt
	.venv-peers/bin/pip install --quiet --no-deps --requirement benchmarks/requirements-no-deps.txt
	.venv-peers/bin/pip install --quiet --editable . optax
	touch $@

clean:
	rm -rf .venv .venv-peers .pytest_cache .ruff_cache dist site
