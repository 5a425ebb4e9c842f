# Everything a person needs:
#   make train       set up, then train the embedded job on the CPU and show that it learned
#   make test        set up, then pass the tests
#   make setup       only set up (.venv); LOCK=requirements-cuda.lock overrides the choice of lock
# and for those who work on toolgrpo:
#   make check       formatting, lint, types, English make test-slow   the long tests
#   make bench       the benchmarks                   make lock        resolve the lock files again
#   make docs        the pages as a site, in build/site
#   make wheels      the wheels of toolgrpo and of its sandbox, confined-python, in dist
#   make gpu-proof   on a machine with an NVIDIA GPU: what only a GPU can show, as one table

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK ?= $(if $(shell command -v nvidia-smi 2>/dev/null),requirements-cuda.lock,requirements-cpu.lock)
STAMP := $(VENV)/.installed
FINGERPRINT = $(shell cat $(LOCK) pyproject.toml confined-python/pyproject.toml Makefile 2>/dev/null | cksum | tr ' ' '-')-$(notdir $(LOCK))
TORCH = $(shell grep -o '^torch==[^ ]*' $(LOCK))
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV := uv==0.13.9
# Environments of uv and rye come without pip.
HAVE_PIP = $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || \
	uv pip install --quiet --python $(BIN)/python pip || { echo "$(VENV) has no pip, and neither ensurepip nor uv could bring one; remove $(VENV), and make makes its own"; exit 2; }

WORKERS = $(BIN)/python -c 'import psutil; print(max(2, min(4, psutil.virtual_memory().total // (5 * 2**30))))'
CORES = $(BIN)/python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)'

# Triton compiles with it when vLLM's first kernel runs, which is too late to hear of it.
HAS_PYTHON_H = import os, sys, sysconfig; file = os.path.join(sysconfig.get_paths()["include"], "Python.h"); sys.exit(not os.path.exists(file) and "a GPU needs the headers of Python, and there is no %s. Install them (python3-dev), or take a Python that has them: make setup PYTHON=..." % file)

.PHONY: setup train test test-slow check bench docs wheels gpu-proof lock clean

setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "toolgrpo needs Python 3.11 or newer; %s is %s. Try: make setup PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(FINGERPRINT)" ]; then $(MAKE) --no-print-directory install; fi

.PHONY: install
install:
	@test -f $(LOCK) || { echo "LOCK=$(LOCK): there is no such file"; exit 2; }
	@case $(LOCK) in *cuda*) $(PYTHON) -c '$(HAS_PYTHON_H)';; esac
	@echo "setting up $(VENV) from $(LOCK) (a few minutes the first time)"
	@if [ -e $(VENV)/.lock ] && [ "$$(cat $(VENV)/.lock)" != "$(notdir $(LOCK))" ]; then \
		echo "$(VENV) was set up from $$(cat $(VENV)/.lock), whose packages would stay beside those of $(LOCK): it is made anew"; rm -rf $(VENV); fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(HAVE_PIP)
	@echo "$(notdir $(LOCK))" > $(VENV)/.lock
	@rm -f $(STAMP)
	@echo "1 of 3: PyTorch ($(TORCH))"
	@awk '/^torch==/ {torch = 1} torch {print} torch && !/\\$$/ {exit}' $(LOCK) > $(VENV)/torch.lock
	@$(PIP) install --quiet --no-deps -r $(VENV)/torch.lock 2>$(VENV)/torch.log || \
		{ case "$(TORCH)" in *+cpu) $(PIP) install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu -r $(VENV)/torch.lock;; *) cat $(VENV)/torch.log; false;; esac; }
	@echo "2 of 3: the installer ($(UV))"
	@$(PIP) install --quiet $(UV) 2>$(VENV)/uv.log || true
	@echo "3 of 3: the other $$(grep -c '==' $(LOCK)) packages of the lock"
	@DS_BUILD_OPS=0 $(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --compile-bytecode -r $(LOCK) 2>>$(VENV)/uv.log || \
		{ echo "uv could not install the lock ($(VENV)/uv.log says why), so pip does, in several times the time"; \
		  DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps -r $(LOCK); }
	@$(PIP) install --quiet --no-deps --no-build-isolation -e ./confined-python -e .
	@echo "$(FINGERPRINT)" > $(STAMP)
	@echo "ready: $(BIN)/python"

train: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS="$${OMP_NUM_THREADS:-$$($(CORES))}" accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/train.py --config recipes/configs/nano.yaml $(ARGS)

# Two processes share the test files, or up to four where there are 5 GiB for each, which fills the waits of two; each file
# runs whole in one of them. Real tokenizers are fetched once, as far as 60 s allow.
test: setup
	@$(BIN)/python tests/real_tokenizers/fetch.py --fewer --limit 60 || true
	@PATH="$(CURDIR)/$(BIN):$$PATH" python -m pytest -m "not slow" --numprocesses $$($(WORKERS)) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" python -m pytest -m slow $(ARGS)

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python .ci/english
	@$(BIN)/python -m pytest -q -n0 --noconftest -p no:cacheprovider tests/project/test_dependencies.py # imports against pyproject.toml

# FAST=1: the quick forms of the quickest, in under five minutes. `make bench ARGS=--list` says what there is.
bench: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" python benchmarks/run_all.py $(if $(FAST),--fast) $(ARGS)

# An environment of its own: the API reference is read from the source, so nothing of ours is imported.
docs:
	@cmp -s requirements-docs.lock build/docs-env/requirements-docs.lock || \
		{ $(PYTHON) -m venv --clear build/docs-env && build/docs-env/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.lock \
		  && cp requirements-docs.lock build/docs-env; }
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet
	@echo "ready: build/site/index.html"

wheels: setup
	@cd confined-python && ../$(BIN)/hatchling build -t wheel -d ../dist
	@$(BIN)/hatchling build -t wheel -d dist

# It asks for the driver before it installs anything. `make gpu-proof ARGS="--only nano sleep"`: some parts.
gpu-proof:
	@nvidia-smi >/dev/null 2>&1 || { echo "make gpu-proof needs an NVIDIA GPU with a driver for CUDA 13, and nvidia-smi finds none here; 'python benchmarks/gpu_proof.py --device cpu --tiny' runs what can be run without one"; exit 2; }
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1); test "$${driver%%.*}" -ge 580 2>/dev/null || \
		{ echo "make gpu-proof needs an NVIDIA driver of version 580 or newer (CUDA 13), and this is $$driver; nothing was installed"; exit 2; }
	@$(MAKE) --no-print-directory setup LOCK=requirements-cuda.lock
	@PATH="$(CURDIR)/$(BIN):$$PATH" python benchmarks/gpu_proof.py $(ARGS)

lock: setup
	@$(HAVE_PIP)
	@$(PIP) install --quiet $(UV)
	@UVFLAGS="$(UVFLAGS)" .ci/lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
