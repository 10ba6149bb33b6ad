# `make demo` shows the main job, `make test` checks a change, `.ci/run` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH := .venv-bench
DATA_BENCHMARKS := build loader resume stream
OTHER_BENCHMARKS := span_corruption step step_t5 step_encoders generation
# torch-xla needs a torch of its own, 7 GB in all: an environment outside the checkout, one for each set of pins.
XLA_PINS := $(shell { cat constraints-xla.txt docker/constraints-tpu.txt; $(PYTHON) --version; } | sha256sum | cut -c1-12)
XLA_ENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/samestep/xla-$(XLA_PINS)

# Tests start hundreds of processes, each of which would compile our modules again.
export PYTHONDONTWRITEBYTECODE :=

# Tests wait for a third of their time, so there are more workers than cores.
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test test-long test-all test-exhaustive test-kernels test-kernels-all test-images test-slurm test-xla test-xla-all test-tpu-compiler test-gpu check docs conformance chaos fuzz bench bench-gpu bench-scale clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP)  ## make .venv with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "samestep needs Python 3.11 or newer; name one with: make install PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "this Python cannot make virtual environments; on Debian/Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "installing samestep and its tools into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools
	@# DeepSpeed comes as source, looks for torch when it is built, and would compile for the hardware that it finds.
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --no-build-isolation deepspeed
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[accelerate,dedup,deepspeed,dev,docs,hf,http,parquet,plot,s3,tasks,tensorboard,text,wandb]'
	@touch $@

demo: install  ## pre-train a tiny model, kill it, resume it on more processes, export it (CPU, a few minutes)
	@$(BIN)/python -m examples.demo

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: install  ## the documentation as a site with search, in build/docs; fails if a link leads nowhere (a minute)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "wrote build/docs; to read and search it: $(BIN)/python -m http.server --directory build/docs"

test: check  ## format, lint, types, import contracts and tests (7 minutes)
	$(PYTEST) --ignore tests/kernels

test-long: install  ## the slower tests, of more than 0.7 seconds of CPU (20 minutes)
	$(PYTEST) --ignore tests/kernels --ignore tests/xla -m 'long and not exhaustive and not chaos'

test-all: test test-long  ## test and test-long

test-exhaustive: install  ## the remaining combinations of families, strategies and sizes (20 minutes)
	$(PYTEST) --ignore tests/kernels --ignore tests/xla -m exhaustive

test-kernels: install  ## GPU kernels without a GPU: interpreted, compiled for each GPU; graphs of torch.compile (5 minutes)
	$(PYTEST) tests/kernels

test-kernels-all: test-kernels  ## the same for every head width, precision, model and strategy
	$(PYTEST) tests/kernels -m 'exhaustive or long'

test-slurm: install  ## runs launched on a real Slurm of three virtual nodes (installs Debian's packages; needs root)
	@{ command -v munged && command -v slurmctld && command -v slurmd; } >/dev/null || { echo "installing slurm-wlm and munge"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes slurm-wlm munge >/dev/null; }
	SAMESTEP_SLURM=1 $(BIN)/python -m pytest tests/slurm

test-gpu: install  ## the tests of GPUs, on all that torch finds: each strategy, precision and family against a CPU
	$(BIN)/python -m pytest -n 0 -rs tests/conformance/test_cuda.py tests/kernels/test_attention.py

test-xla: install $(XLA_ENV)/.installed  ## the tests of TPUs' code, on XLA's CPU back-end (an environment of 7 GB the first time)
	SAMESTEP_XLA_PYTHON=$(XLA_ENV)/bin/python $(BIN)/python -m pytest -n 2 tests/xla

test-xla-all: test-xla  ## the same for every family and option
	SAMESTEP_XLA_PYTHON=$(XLA_ENV)/bin/python $(BIN)/python -m pytest -n 2 tests/xla -m exhaustive

test-tpu-compiler: install $(XLA_ENV)/.installed  ## whole training steps with the compiler of TPUs: memory and traffic beside samestep plan (half an hour; resumes)
	SAMESTEP_XLA_PYTHON=$(XLA_ENV)/bin/python $(BIN)/python -m benchmarks.tpu_compiler $(OPTIONS)

$(XLA_ENV)/.installed:
	@echo "installing torch 2.9 and torch-xla into $(XLA_ENV) (some minutes)"
	@test -x $(XLA_ENV)/bin/python || $(PYTHON) -m venv $(XLA_ENV)
	@$(XLA_ENV)/bin/python -m pip install --quiet --no-cache-dir --requirement constraints-xla.txt
	@# The TPUs' compiler lies apart, so that torch-xla and JAX see no TPU.
	@$(XLA_ENV)/bin/python -m pip install --quiet --no-cache-dir --no-deps --target $(XLA_ENV)/tpu $$(grep ^libtpu docker/constraints-tpu.txt)
	@touch $@

test-images: install  ## build both images and run the demo in them (buildah and debootstrap, as root; half an hour)
	SAMESTEP_TEST_IMAGES=cuda,tpu $(BIN)/python -m pytest tests/docker

conformance: install  ## the full same-step matrix (35 minutes; resumes), written to docs/conformance.md
	$(BIN)/python -m tests.conformance.matrix $(if $(ONLY),--only '$(ONLY)')
	$(if $(ONLY),,$(BIN)/python -m tests.conformance.exact_matrix)

chaos: install  ## faults of all kinds (an hour and a half; those of networks need root); what each has cost is written to docs/reliability.md
	$(BIN)/python -m pytest -m chaos --ignore tests/chaos/test_faults.py
	$(BIN)/python -m tests.chaos.table
	$(BIN)/python -m tests.fail_points

fuzz: install  ## hostile files for all readers (an hour, or FUZZ_SECONDS; continues); what was tried is written to docs/security.md
	nice $(BIN)/python -m tests.fuzz.run --seconds $(or $(FUZZ_SECONDS),3600)

bench: $(BENCH)/.installed  ## speed beside other systems (half an hour); CORPUS=FILES names JSON Lines to work on
	@for name in $(DATA_BENCHMARKS); do \
	  $(BENCH)/bin/python -m benchmarks.$$name $(if $(CORPUS),--corpus $(CORPUS)) || exit 1; done
	@for name in $(OTHER_BENCHMARKS); do $(BENCH)/bin/python -m benchmarks.$$name || exit 1; done

bench-gpu: $(BENCH)/.installed  ## training steps on a GPU beside Hugging Face Trainer (two hours or more), written to docs/benchmarks.md
	@$(BENCH)/bin/python -m benchmarks.gpu $(OPTIONS)

bench-scale: install  ## how costs grow with shards, ranks, machines and steps (minutes; OPTIONS=--full: an hour)
	@$(BIN)/python -m benchmarks.scale $(OPTIONS)

# The other systems have an environment of their own, so that they cannot change what is tested.
$(BENCH)/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt
	@echo "installing samestep and the systems that it is compared with into $(BENCH)"
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(BENCH)/bin/python -m pip install --quiet --constraint constraints.txt --constraint benchmarks/constraints.txt \
	  --editable '.[hf,s3]' accelerate litdata 'moto[s3,server]' transformers
	@touch $@

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) $(BENCH) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
