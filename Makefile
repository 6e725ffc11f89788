# Everything a new checkout needs; `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Compiled XLA programs are kept between runs of the tests.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export NPROC ?= 64

.PHONY: help env train quick test test-slow test-audit test-optimized test-processors test-all check rules-check conformance conformance-tpu conformance-gpu test-gpu-plans suites oracle test-versions products fuzz fuzz-short bench bench-serving bench-eager bench-host bench-replay bench-torch bench-commits bench-checkpoints docs check-docs dist test-torchtitan env-torchtitan torchtitan-parity test-torchtitan-main test-horovod bench-horovod bench-layouts bench-tune test-transformers env-transformers transformers-table test-libraries env-libraries libraries-table clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

env: $(VENV)/.installed ## the virtual environment, from the pinned constraints

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

PROCESSES ?= 1
LAUNCH := $(if $(filter-out 1,$(PROCESSES)),-m torch.distributed.run --standalone --nproc-per-node=$(PROCESSES))
train: env ## train the example on a simulated 2x4 mesh (about two minutes); PROCESSES=2 shares it out
	$(BIN)/python $(LAUNCH) examples/train_llama/train.py $(ARGS)

RUN := $(BIN)/python tests/run.py
quick: env ## one test in fifty, a first signal in 90 seconds
	$(RUN) quick -- $(ARGS)

PROCESSOR ?=
test: env ## all tests but the slow ones (ten minutes on two cores); PROCESSOR=1..4 rounds as another
	$(RUN) $(if $(PROCESSOR),processor $(PROCESSOR),fast) -- $(ARGS)

test-slow: env ## the slow tests
	$(RUN) slow -- $(ARGS)

test-processors: env ## the tests as four other processors round (two hours)
	$(RUN) processors -- $(ARGS)

test-audit: env ## the tests of compiled steps, each call audited (about twelve minutes)
	$(RUN) audit -- $(ARGS)

test-optimized: env ## one test in fifty, compiled with the effort that users' programs are (ARGS="--one-in 5" for more)
	$(RUN) optimized -- $(ARGS)

test-all: check test test-slow test-audit test-optimized rules-check suites fuzz-short ## everything there is (about three hours on two cores)

# torchtitan's own pins differ from ours, so it has an environment of its own.
TITAN_VENV ?= .venv-torchtitan
TITAN := $(TITAN_VENV)/bin/python
TITAN_PINS := tests/torchtitan/constraints.txt
TITAN_CLASSIC := $(TITAN_VENV)/classic
env-torchtitan: $(TITAN_VENV)/.installed ## the environment for torchtitan's models and trainer

$(TITAN_VENV)/.installed: pyproject.toml constraints.txt $(TITAN_PINS)
	$(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN) -m pip install --quiet -c constraints.txt -c $(TITAN_PINS) --editable . pytest \
	  datasets einops grain pillow safetensors tensorboard tokenizers torchdata tyro
	$(TITAN) -m pip install --quiet -c $(TITAN_PINS) --no-deps torchtitan spmd_types torch_checkpointing
	$(TITAN) -m pip install --quiet --no-deps --target $(TITAN_CLASSIC) torchtitan==0.2.2 tomli==2.5.0
	touch $@

# 0.2.2, whose plans are others, lies beside 0.3.0 in a folder that comes first where it is asked for.
CLASSIC := PYTHONPATH=$(abspath $(TITAN_CLASSIC)) $(TITAN)
test-torchtitan: env-torchtitan ## torchtitan's models and trainer (ARGS="-m slow" for the rest)
	$(TITAN) -m pytest -m 'not slow' tests/torchtitan $(ARGS)
	$(CLASSIC) -m pytest -m 'not slow' tests/torchtitan/test_models.py $(ARGS)

# The main line, where its source is at hand (TORCHTITAN_SOURCE=folder), which comes first there.
TITAN_MAIN := PYTHONPATH=$(abspath $(TORCHTITAN_SOURCE)) $(TITAN)
test-torchtitan-main: env-torchtitan ## the main line's models (TORCHTITAN_SOURCE=folder)
	$(TITAN_MAIN) -m pytest -m 'not slow' tests/torchtitan/test_models.py $(ARGS)

torchtitan-parity: env-torchtitan ## the table of docs/torchtitan.md, 20 steps of each plan (half an hour; goes on where it was stopped)
	$(TITAN) -W ignore -m tests.torchtitan.parity $(ARGS)
	$(CLASSIC) -W ignore -m tests.torchtitan.parity $(ARGS)
	$(if $(TORCHTITAN_SOURCE),$(TITAN_MAIN) -W ignore -m tests.torchtitan.parity $(ARGS))

# transformers likewise: what it wants of tokenizers and the hub needn't be what torchtitan wants.
HF_VENV ?= .venv-transformers
HF := $(HF_VENV)/bin/python
HF_PINS := tests/transformers/constraints.txt
env-transformers: $(HF_VENV)/.installed ## the environment for Hugging Face transformers

$(HF_VENV)/.installed: pyproject.toml constraints.txt $(HF_PINS)
	$(PYTHON) -m venv $(HF_VENV)
	$(HF) -m pip install --quiet -c constraints.txt -c $(HF_PINS) --editable . pytest transformers
	touch $@

test-transformers: env-transformers ## transformers' models: loss, gradients, training, generate (ARGS="-m slow" for the rest)
	$(HF) -m pytest -m 'not slow' tests/transformers $(ARGS)

transformers-table: env-transformers ## the table of docs/transformers.md
	$(HF) -W ignore -m tests.transformers.table $(ARGS)

# Libraries that find the device, and those that take it: of all that are built on torch, twenty.
LIBRARIES_VENV ?= .venv-libraries
LIBRARIES := $(LIBRARIES_VENV)/bin/python
LIBRARY_PINS := tests/libraries/constraints.txt
env-libraries: $(LIBRARIES_VENV)/.installed ## the environment for accelerate, Lightning, peft and others

$(LIBRARIES_VENV)/.installed: pyproject.toml constraints.txt $(LIBRARY_PINS)
	$(PYTHON) -m venv $(LIBRARIES_VENV)
	$(LIBRARIES) -m pip install --quiet -c constraints.txt -c $(LIBRARY_PINS) --editable . \
	  pytest pytest-xdist $$(sed 's/==.*//; /^#/d' $(LIBRARY_PINS))
	touch $@

test-libraries: env-libraries ## twenty libraries built on torch: losses, checkpoints, files (five minutes)
	$(LIBRARIES) tests/run.py libraries -- $(ARGS)

libraries-table: env-libraries ## the table of docs/libraries.md (ten minutes)
	$(LIBRARIES) -W ignore -m tests.libraries.table $(ARGS)

check: env ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

rules-check: env ## the layout rules against what XLA does (about eight minutes on two cores)
	$(BIN)/python -m tools.rule_check $(ARGS)

SUITES := $(BIN)/python -W ignore -m tests.suites
SUITE_RECORDS := .cache/suites
suites: conformance ## torch's op_db, module_db and optim_db, and one report (about a quarter of an hour on two cores)
	mkdir -p $(SUITE_RECORDS)
	for i in 0 1; do ( \
	  $(SUITES) modules --shard $$i/2 --limit 4 --out $(SUITE_RECORDS)/modules.$$i && \
	  $(SUITES) optimizers --shard $$i/2 --out $(SUITE_RECORDS)/optimizers.$$i ) & \
	done > $(SUITE_RECORDS)/log 2>&1; wait
	$(BIN)/python -W ignore -m tests.suites.report $(RECORDS)/*.[01] $(SUITE_RECORDS)/*.[01] > tests/suites/REPORT.md

test-versions: ## the supported versions of Python, torch and JAX, and the table of docs/versions.md (40 GB of environments)
	$(PYTHON) tools/versions.py $(ARGS)

PRODUCTS := $(BIN)/python -W ignore -m tests.compilation.random_products --cases 2500
products: env ## 5,000 random products and moves on three and four mesh axes against CPU torch (ten minutes on two cores)
	$(PRODUCTS) --mesh 2x2x2 $(ARGS) & three=$$!; $(PRODUCTS) --mesh 2x2x2x2 $(ARGS); four=$$?; wait $$three && exit $$four

FUZZ := $(BIN)/python -W ignore -m tests.fuzz
fuzz: env ## 20,000 random programs, each in four ways, against CPU torch (seven hours on one core; goes on where it was stopped)
	$(FUZZ) --programs 20000 --resume $(ARGS)

fuzz-short: env ## ten minutes of it, from a seed that is the day's
	$(FUZZ) --programs 100000 --first $$(($$(date +%s) / 86400 % 1000 * 100000)) --minutes 10 --out .cache/fuzz-short $(ARGS)

test-horovod: env ## Horovod's torch tests with ranks that are devices, threads, and 2 and 4 processes (ten minutes)
	$(BIN)/python -m pytest tests/horovod tests/examples/test_horovod_mnist.py $(ARGS)

oracle: env ## all scenarios and random programs, torchrun against one process, two and four (an hour)
	$(BIN)/python -m pytest tests/oracle $(ARGS)

CONFORMANCE := $(BIN)/python -W ignore -m tests.conformance --restart
RECORDS := .cache/conformance
conformance: env ## every op of torch's op_db against CPU torch (about ten minutes on two cores)
	mkdir -p $(RECORDS)
	for i in 0 1; do ( \
	  $(CONFORMANCE) --shard $$i/2 --limit 2 --out $(RECORDS)/float32.$$i && \
	  $(CONFORMANCE) --shard $$i/2 --limit 1 --mesh 5 --forms forward,backward --out $(RECORDS)/even.$$i && \
	  for d in bfloat16 int64 bool; do \
	    $(CONFORMANCE) --shard $$i/2 --limit 2 --forms forward --dtype $$d --out $(RECORDS)/$$d.$$i || exit; \
	  done && \
	  $(CONFORMANCE) --shard $$i/2 --limit 2 --forms forward,backward --dtype complex64 --out $(RECORDS)/complex64.$$i ) & done 2> $(RECORDS)/warnings; wait
	$(BIN)/python -m tests.conformance.report $(RECORDS)/*.[01] > tests/conformance/REPORT.md

# The TPU's compiler, which needs no TPU (500 MB).
LIBTPU ?= .cache/libtpu
$(LIBTPU)/libtpu/libtpu.so:
	$(PYTHON) -m pip install --quiet --no-deps --target $(LIBTPU) libtpu==0.0.52
WITH_TPU_COMPILER = TPU_LIBRARY_PATH=$(abspath $(LIBTPU))/libtpu/libtpu.so

conformance-tpu: env $(LIBTPU)/libtpu/libtpu.so ## every op of op_db through the TPU's compiler (half an hour; goes on where it was stopped)
	mkdir -p $(RECORDS)
	for i in 0 1; do \
	  $(WITH_TPU_COMPILER) $(CONFORMANCE) --compile-for v5e:2x4 \
	    --resume --limit 2 --timeout 300 --shard $$i/2 --out $(RECORDS)/tpu.$$i || exit; \
	done
	$(BIN)/python -m tests.conformance.compiled_report $(RECORDS)/tpu.[01] > tests/conformance/TPU.md

# XLA's GPU compiler, which needs no GPU: JAX's plugin of the version that is here (140 MB), and cuDNN
# for its attention (900 MB).
GPU_COMPILER ?= .cache/gpu-compiler
$(GPU_COMPILER)/jax_plugins: | env
	v=$$($(BIN)/python -c "import jax; print(jax.__version__)") && \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(GPU_COMPILER) \
	  jax-cuda13-pjrt==$$v jax-cuda13-plugin==$$v nvidia-cudnn-cu13
WITH_GPU_COMPILER = PYTHONPATH=$(abspath $(GPU_COMPILER))$${PYTHONPATH:+:$$PYTHONPATH}

test-gpu-plans: env $(GPU_COMPILER)/jax_plugins ## plans for GPUs, by XLA's GPU compiler (a minute)
	$(WITH_GPU_COMPILER) $(BIN)/python -m pytest tests/planning tests/conformance/test_compiled.py $(ARGS)

conformance-gpu: env $(GPU_COMPILER)/jax_plugins ## every op of op_db through XLA's GPU compiler (goes on where it was stopped)
	mkdir -p $(RECORDS)
	for i in 0 1; do \
	  ( $(WITH_GPU_COMPILER) $(CONFORMANCE) --compile-for h100:2x4 \
	    --resume --limit 2 --timeout 300 --shard $$i/2 --out $(RECORDS)/gpu.$$i ) & \
	done; wait
	$(BIN)/python -m tests.conformance.compiled_report $(RECORDS)/gpu.[01] > tests/conformance/GPU.md

bench: env ## the compiled step against hand-written JAX
	$(BIN)/python benchmarks/step_vs_jax.py $(ARGS)

bench-serving: env ## decoding by a compiled step, hand-written JAX and transformers' generate (ten minutes)
	$(BIN)/python benchmarks/serving.py $(ARGS)

bench-eager: env ## the time per eager call, next to torch's DTensor and jax.jit
	$(BIN)/python benchmarks/eager.py $(ARGS)

bench-host: env ## the host's time for a compiled call of 600 parameters, next to jax.jit (about five minutes)
	$(BIN)/python benchmarks/host_overhead.py $(ARGS)

bench-replay: env ## the host's time for a step whose Python runs in every call
	$(BIN)/python benchmarks/replay.py $(ARGS)

bench-torch: env ## FSDP x TP against torch's DTensor in 8 gloo processes (about two minutes)
	$(BIN)/python benchmarks/vs_torch_dtensor.py $(ARGS)

bench-commits: env ## eager and compiled calls of this checkout and another commit (BASE=...), in one run
	$(BIN)/python benchmarks/compare_commits.py $(or $(BASE),main) $(ARGS)

bench-checkpoints: env ## saving and loading 2 GB: time next to dd, and the memory of the host (five minutes)
	$(BIN)/python benchmarks/checkpoints.py $(ARGS)

bench-horovod: env ## a DistributedOptimizer's step against DistributedDataParallel in 8 gloo processes and xd.replicate
	$(BIN)/python benchmarks/horovod.py $(ARGS)

# What a commit has found is kept in a folder of its name.
TUNED = .cache/tuned-$$(git rev-parse --short HEAD)
bench-tune: env $(LIBTPU)/libtpu/libtpu.so $(GPU_COMPILER)/jax_plugins ## the tables of docs/tune.md (two hours on two cores; goes on where it was stopped)
	$(WITH_TPU_COMPILER) $(BIN)/python -W ignore benchmarks/tune_known.py 8b 70b long offload --top 3 --kept $(TUNED)
	$(WITH_GPU_COMPILER) $(BIN)/python -W ignore benchmarks/tune_known.py experts autoparallel-8b autoparallel-70b --top 3 --kept $(TUNED)
	$(WITH_GPU_COMPILER) $(BIN)/python -W ignore benchmarks/tune_by_hand.py h100-8b titan-8b h100-70b titan-70b --top 4 --kept $(TUNED)
	$(WITH_TPU_COMPILER) $(BIN)/python -W ignore benchmarks/tune_by_hand.py v5p-8b v5e-8b v5p-70b --top 2 --kept $(TUNED)
	$(BIN)/python -W ignore benchmarks/tuned.py
	$(BIN)/python -W ignore benchmarks/tuned.py --timed

bench-layouts: env ## what steps move, layout by layout, next to JAX's (two hours on two cores; goes on where it was stopped)
	$(BIN)/python -W ignore benchmarks/layout_sweep.py --json .cache/layouts.json --resume --table .cache/layouts.md $(ARGS)

# What draws the architecture picture; without npm the page leaves it to the reader's network.
MERMAID := .cache/mermaid.min.js
$(MERMAID):
	mkdir -p .cache/npm
	-cd .cache/npm && npm pack --silent mermaid@11 && tar xzf mermaid-*.tgz && cp package/dist/mermaid.min.js ..
	rm -rf .cache/npm

$(VENV)/.docs: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs $(MERMAID) ## the site, in build/site; fails on a warning (half a minute)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check-docs: docs ## every page of the site in a headless Chromium, and every link (Debian's chromium, chromium-driver)
	$(BIN)/python tools/site/check.py build/site

dist: ## sdist and wheel, and the README's first program with the wheel in a new environment (two minutes)
	rm -rf dist .cache/dist build/lib
	$(PYTHON) -m venv .cache/dist
	.cache/dist/bin/python -m pip install --quiet build
	.cache/dist/bin/python -m build --outdir dist
	.cache/dist/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd .cache && dist/bin/python ../tools/first_program.py ../README.md ../dist

clean: ## remove the environment and caches
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .ruff_cache .mypy_cache
