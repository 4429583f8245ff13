PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1
export DAGSTER_HOME ?= $(CURDIR)/.dagster_home

.PHONY: demo test check dev smollm2 lint types install clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; some minutes)"
	@$(BIN)/pip install -q -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/llm-assets run -r tiny

test: $(STAMP)
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(STAMP)
	@$(BIN)/mypy

check: lint types test

dev: $(STAMP)
	@mkdir -p $(DAGSTER_HOME)
	@$(BIN)/python -c 'from llm_assets.places import ensure_dagster_home; ensure_dagster_home()'
	@$(BIN)/dagster dev -w workspace.yaml

clean:
	rm -rf .llm-assets .dagster_home
