# `make demo` and `make test` do all set-up from a plain python3 (3.11 to 3.13).
PYTHON ?= python3
VENV ?= .venv
JAX ?=
BIN = $(VENV)/bin

.PHONY: demo test lint clean
demo: $(VENV)/.installed
	$(BIN)/python scripts/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: pass PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test,dev,tokenizer]' $(JAX)
	touch $@

clean:
	rm -rf $(VENV) .venv-newer .venv-oracle
