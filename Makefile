# Plain `make` lists the targets. Every target sets up .venv first, when it is missing or out of date.
#
# ARGS passes more flags to the command of sim-run, sim-test and gpu-test: make sim-test ARGS='-x -k clocks'
# WHEELHOUSE names a folder of wheels (`make wheelhouse` fills one): set-up then asks no network, and
# installs what a GPU run needs too.
# PYTHON names the interpreter to build .venv with; without it .ci/find-python chooses.
# SYSTEM_PACKAGES=1 lets .venv use what that interpreter has, such as the torch of a container. A .venv
# that was built so stays so.

SHELL := bash
.DEFAULT_GOAL := help

# The last file that setting up writes, so a set-up that stopped half way starts over.
STAMP := .venv/.installed
INSTALL = $(if $(USES_WHEELS),$(FROM_WHEELS),-e '.[dev]')
# `make wheelhouse` fills the folder that WHEELHOUSE names.
USES_WHEELS = $(and $(WHEELHOUSE),$(filter-out wheelhouse,$(or $(MAKECMDGOALS),setup)))
# Without isolation: what builds the project itself comes from the same folder.
FROM_WHEELS = --no-index --find-links $(WHEELHOUSE) 'setuptools>=77' wheel && \
	.venv/bin/python -m pip install -qq --disable-pip-version-check --no-index \
	--find-links $(WHEELHOUSE) --no-build-isolation -e '.[dev,gpu]'
NO_GPU = { echo "gpu-test: expected at least one CUDA GPU $(1), found none." >&2; exit 2; }

# The interpreter a finished and living .venv was built with; empty when there is none.
VENV_PYTHON := $(shell test -e $(STAMP) && test -x .venv/bin/python && cat .venv/.built-with 2>/dev/null)
ifneq ($(VENV_PYTHON),$(or $(PYTHON),$(VENV_PYTHON),none))
REBUILD := yes
else ifneq ($(SYSTEM_PACKAGES),)
REBUILD := $(if $(wildcard .venv/lib/python*/site-packages/system-packages.pth),,yes)
PYTHON := $(or $(PYTHON),$(VENV_PYTHON))
endif
ifeq ($(REBUILD),yes)
.PHONY: $(STAMP)
endif

# A path file and not --system-site-packages: an interpreter of a virtual environment has its own.
define USE_SYSTEM_PACKAGES
"$$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	>"$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-packages.pth"
endef

export GPUS NNODES WHEELHOUSE DRY_RUN SYSTEM_PACKAGES
.PHONY: help setup sim-run sim-test gpu-test wheelhouse bench check lint types format clean

## help: print this list
help:
	@sed -n 's/^## \([a-z-]*\): */  \1\t/p' Makefile | expand -t 13

## setup: build .venv with everything the CPU targets need (about 5.5 GB on Linux)
setup: $(STAMP)

## sim-run: run the default scenario in the simulator
sim-run: $(STAMP)
	.venv/bin/python -m sim run $(ARGS)

## sim-test: run the tests that need no GPU
sim-test: $(STAMP)
	.venv/bin/python -m pytest -m 'not gpu' -n auto --maxprocesses 4 --dist loadfile $(ARGS)

## gpu-test: run what needs GPUs, on GPUS of them and NNODES machines; fails without one
gpu-test:
	@test -n "$$DRY_RUN" || ls /dev/nvidia[0-9]* /dev/dxg 2>/dev/null | grep -q . || $(call NO_GPU,on this machine)
	@$(MAKE) -s --no-print-directory setup
	@.ci/gpu-test $(ARGS)

## wheelhouse: collect all wheels for a GPU machine without a network (WHEELHOUSE=folder)
wheelhouse: $(STAMP)
	@.ci/wheelhouse

## bench: measure speed beside peers, one JSON line a figure
bench: $(STAMP)
	.venv/bin/python -m sim bench $(ARGS)

## check: run lint, types and sim-test
check: lint types sim-test

## lint: check style and formatting
lint: $(STAMP)
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check

## types: check the types of sim and real
types: $(STAMP)
	.venv/bin/python -m mypy

## format: sort imports and format the code
format: $(STAMP)
	.venv/bin/python -m ruff check --select I --fix
	.venv/bin/python -m ruff format

## clean: remove caches, build folders and the output of runs; keeps .venv
clean:
	rm -rf build dist out runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed pyproject.toml updates .venv in place; anything else that is wrong with .venv builds it anew.
$(STAMP): pyproject.toml
ifeq ($(REBUILD),yes)
	@python=$$(PYTHON="$(PYTHON)" .ci/find-python) && rm -rf .venv && "$$python" -m venv .venv && echo "$$python" >.venv/.built-with $(if $(SYSTEM_PACKAGES),&& $(USE_SYSTEM_PACKAGES))
endif
	@rm -f $@; echo "Setting up .venv ($$(cat .venv/.built-with)): some minutes when torch is new to it, about 5.5 GB with CUDA."
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(INSTALL) && touch $@
