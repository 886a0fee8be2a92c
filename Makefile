# Every target does its own set-up: a .venv in the checkout, kept if it is there.
TORCH ?= 2.13.0
# Arguments for pip where torch is fetched: the index of CPU builds, say, where the default one has CUDA builds only.
TORCH_PIP_ARGS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environments of test-versions, one for each list of versions in tests/versions.
VERSIONS ?= lowest middle newest

.PHONY: quickstart check test test-all test-device test-slurm test-failed test-versions rehearse lint bench soak gpu-day docs clean

quickstart: $(VENV)/.installed
	$(BIN)/python recipes/quickstart.py $(if $(MODEL),--model $(MODEL))

# About two minutes: lint, types, and the tests that start no ranks.
check: lint
	$(BIN)/python -m pytest -m "not ranks and not launch and not slow and not gpu and not slurm and not device and not rehearsal"

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow and not gpu and not slurm and not device and not rehearsal"

rehearse: $(VENV)/.installed
	$(BIN)/python -m pytest -m rehearsal

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not gpu and not slurm" --timeout=1800

# On an accelerator emulated on the CPU; needs g++ and Python's headers. It is built once.
test-device: $(VENV)/.installed
	REQUIRE_DEVICE=1 $(BIN)/python -m pytest -m "device and not slow" tests/device

# As root: starts a Slurm of its own and installs the packages for it where they are missing.
test-slurm: $(VENV)/.installed
	$(BIN)/python -m pytest -m slurm tests/slurm

# The tests that failed in the last run of any target above.
test-failed: $(VENV)/.installed
	REQUIRE_DEVICE=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# The lowest, a middle and the newest set of versions in tests/versions; VERSIONS=newest tests one of them.
test-versions: $(VERSIONS:%=.venv-versions/%/.installed)
	$(PYTHON) tests/versions/run.py $(VERSIONS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/budgets.py
	$(BIN)/python tests/private_names.py

bench: $(VENV)/.installed
	for claim in load save export step plan recipes; do $(BIN)/python -m benchmarks.$$claim || exit 1; done

# Kills runs at random moments and resumes them, in a new directory. Then compares random runs with stock Trainer's.
KILLS ?= 1000
MUTATIONS ?= 1000
DISK ?= runs/soak
SEED ?= 0
FUZZ_MINUTES ?= 60
soak: $(VENV)/.installed
	$(BIN)/python -m benchmarks.soak --kills $(KILLS) --mutations $(MUTATIONS) --disk $(DISK) --seed $(SEED)
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES) --seed $(SEED) --results $(DISK)/fuzz.jsonl

# On one accelerator, in bounded steps; call it until nothing is left. Needs 60 GB in OUT. The planner's predictions come first.
OUT ?= runs/gpu-day
MINUTES ?= 8
STEPS ?=
AGAIN ?=
gpu-day: $(VENV)/.installed
	test -f $(OUT)/plan.json || { mkdir -p $(OUT) && $(BIN)/python -m benchmarks.gpu_day.predictions $(OUT)/plan.json; }
	$(BIN)/python -m benchmarks.gpu_day --out $(OUT) --minutes $(MINUTES) $(if $(STEPS),--steps $(STEPS)) $(if $(AGAIN),--again $(AGAIN))

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

.venv-versions/%/.installed: tests/versions/%.txt
	$$(grep -o 'python3\.[0-9]*' $<) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) $$(grep ^torch== $<)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-versions build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
