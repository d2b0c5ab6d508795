# `make demo` and `make test` work from a fresh clone: they make .venv, install the pinned versions (constraints.txt) and,
# where it is missing, software OpenGL. What is already there is not made again.
#
#   make test PYTHON=python3.12    another interpreter (3.11 or 3.12)
#   make setup TORCH='...'         other pip arguments for PyTorch, remembered in .venv for later runs
#
# PyPI's Linux wheel of PyTorch is the CUDA build, so a machine with an NVIDIA GPU needs no TORCH. For another build, say
# (the version stays the one in constraints.txt):
#
#   make setup TORCH='torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cu130'
#   make setup TORCH='torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu'    no GPU: a far smaller download

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell cat $(VENV)/.torch 2>/dev/null || echo torch==2.13.0)

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# pytest runs one process per core: one thread in each, for PyTorch and for the software renderer.
ONE_THREAD := OMP_NUM_THREADS=1 LP_NUM_THREADS=1
# Debian package:library, for rendering without a screen
GL := libegl1:libEGL.so.1 libgl1:libGL.so.1 libosmesa6:libOSMesa.so.8

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint types clean FORCE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.installed $(VENV)/.gl ## Install everything into .venv (the targets below do this by themselves)

demo: setup ## Train, evaluate and report, small enough for a CPU
	$(VENV)/bin/unmoved demo

test: lint types ## Everything a change must pass: lint, types, pytest
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: setup ## Check the style (ruff)
	$(VENV)/bin/ruff check

types: setup ## Check the types (mypy --strict)
	$(VENV)/bin/mypy

clean: ## Remove .venv, caches and build files (not runs/)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist docs/_build
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found. Install Python 3.11 or 3.12, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V). unmoved needs Python 3.11 or 3.12: dm_control needs labmaze, which has no wheels" \
	    "for later ones. Name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The pip arguments PyTorch was installed with. Others than last time: the old build goes first, or pip would keep it.
$(VENV)/.torch: FORCE | $(VENV)/bin/python
	@echo '$(TORCH)' | cmp -s - $@ || { \
	  if [ -e $@ ]; then $(PIP) uninstall -qy torch; fi; echo '$(TORCH)' > $@; }

# PyTorch first and by itself, so that nothing else decides which build is taken.
$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing $(TORCH)"
	@$(PIP) install -q $(TORCH) -c constraints.txt || { rm -f $(VENV)/.torch; exit 1; }
	@echo "Installing unmoved and what it needs"
	@$(PIP) install -q -e '.[dev]' -c constraints.txt
	@touch $@

$(VENV)/.gl: | $(VENV)/.installed
	@missing=; \
	for gl in $(GL); do \
	  $(VENV)/bin/python -c "import ctypes; ctypes.CDLL('$${gl#*:}')" 2>/dev/null || missing="$$missing $${gl%%:*}"; \
	done; \
	if [ -z "$$missing" ]; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing OpenGL libraries:$$missing"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq || true; \
	  for package in $$missing; do \
	    apt-get install -qqy --no-install-recommends $$package >/dev/null || echo "Could not install $$package; going on without it." >&2; \
	  done; \
	  touch $@; \
	else \
	  echo "OpenGL libraries are missing; rendering may fail. Install them: sudo apt-get install$$missing" >&2; \
	fi
