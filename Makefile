# make install | demo | test | lint | bench. Everything goes into .venv; nothing else on the machine is touched,
# but for the EGL library that headless rendering needs (scripts/ensure-egl).
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
MARK := .venv/.installed

.PHONY: install demo test lint bench clean

install: $(MARK)

$(MARK): pyproject.toml client/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ./client -e ".[dev,openpi,sim,world,plot,exact]"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps openpi-client dm-tree typing_extensions
	scripts/ensure-egl
	touch $(MARK)

demo: $(MARK)
	$(BIN)/stretto demo

test: $(MARK)
	$(BIN)/pytest

lint: $(MARK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(MARK)
	$(BIN)/stretto bench pi0.5 --json

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
