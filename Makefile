# make demo  installs Taper, fetches the default model and answers one question at full depth and tapered
# make test  installs what the tests need and runs lint, types and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	@$(BIN)/taper pull
	@$(BIN)/taper generate --compare --policy fast --max-tokens 160 "Explain in a few sentences why the sky is blue."

test: lint
	@$(BIN)/taper pull
	@$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/ruff format --check --quiet src tests benchmarks
	@$(BIN)/mypy

format: $(VENV)/installed-test
	@$(BIN)/ruff check --fix src tests benchmarks
	@$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Taper (builds ggml once, about a minute)"
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "installing what the tests need"
	@$(PIP) -e ".[test]"
	@touch $@
