# Every target does its own set-up: a .venv in the checkout, kept if it is there.
TORCH ?= 2.13.0
# Arguments for pip where torch is fetched: the index of CPU builds, say, where the default one has CUDA builds only.
TORCH_PIP_ARGS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Liger's kernels and the Triton that interprets them, where only the test that runs them looks.
KERNELS := $(VENV)/kernels
# The environments of test-versions, one for each list of versions in tests/versions.
VERSIONS ?= lowest newest

.PHONY: quickstart check test test-all test-device test-slurm test-failed test-versions rehearse rehearse-all lint bench soak gpu-day templates docs-tables docs clean

quickstart: $(VENV)/.installed
	$(BIN)/python recipes/quickstart.py $(if $(MODEL),--model $(MODEL))

# About two minutes: lint, types, and the tests that start no ranks.
check: lint
	$(BIN)/python -m pytest -m "not ranks and not launch and not slow and not gpu and not slurm and not device and not rehearsal and not rehearsal_of_all"

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow and not gpu and not slurm and not device and not rehearsal and not rehearsal_of_all"

rehearse: $(VENV)/.installed
	$(BIN)/python -m pytest -m rehearsal

rehearse-all: $(VENV)/.installed
	$(BIN)/python -m pytest -m "rehearsal or rehearsal_of_all"

test-all: $(VENV)/.installed $(KERNELS)
	$(BIN)/python -m pytest -m "not gpu and not slurm and not rehearsal_of_all" --timeout=1800

# On an accelerator emulated on the CPU; needs g++ and Python's headers. It is built once.
test-device: $(VENV)/.installed
	REQUIRE_DEVICE=1 $(BIN)/python -m pytest -m "device and not slow" tests/device

# As root: starts a Slurm of its own and installs the packages for it where they are missing.
test-slurm: $(VENV)/.installed
	$(BIN)/python -m pytest -m slurm tests/slurm

# The tests that failed in the last run of any target above.
test-failed: $(VENV)/.installed
	REQUIRE_DEVICE=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# The lowest and the newest versions that setup.cfg allows; VERSIONS=newest tests one of them.
test-versions: $(VERSIONS:%=.venv-versions/%/.installed)
	$(PYTHON) tests/versions/run.py $(VERSIONS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed
	for claim in load export save report step; do $(BIN)/python -m benchmarks.$$claim || exit 1; done
	$(BIN)/python -m benchmarks.plan --write

# Kills runs at random moments and resumes them; DISK and TMPFS are new directories.
KILLS ?= 1000
DISK ?= runs/soak
TMPFS ?= /dev/shm/hf-fsdp-soak
SEED ?= 0
soak: $(VENV)/.installed
	$(BIN)/python -m benchmarks.soak --kills $(KILLS) --disk $(DISK) --tmpfs $(TMPFS) --seed $(SEED)

# On one accelerator, at most MINUTES per call; call it until nothing is left. MODELS takes 25 GB.
OUT ?= runs/gpu-day
MODELS ?= runs/gpu-day-models
MINUTES ?= 9
AGAIN ?=
gpu-day: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu_day --out $(OUT) --models $(MODELS) --minutes $(MINUTES) $(if $(AGAIN),--again $(AGAIN))

templates: $(VENV)/.installed
	$(BIN)/hf-fsdp config render-all

# docs/reference.md and docs/patches.md, from the code.
docs-tables: $(VENV)/.installed
	$(BIN)/python docs/make_reference.py

# The documentation as a site in site/.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A torch that is already there is kept; where there is none, a pinned one, so that a CPU machine does not pull CUDA.
$(VENV)/.installed: setup.cfg setup.py Makefile
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON); install python3 and python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (TRL needs it): make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(SYSTEM_SITE_PACKAGES),--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

.venv-versions/%/.installed: tests/versions/%.txt setup.cfg
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) $$(grep ^torch== $<)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< -e '.[dev]'
	touch $@

$(KERNELS): | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.9.0 liger-kernel==0.8.5

clean:
	rm -rf $(VENV) .venv-versions build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
