# make train   set up .venv once and train the example: 2 ranks on the CPU, or one rank per GPU
# make test    set up .venv once and run the tests that are quick and need no GPU (6 minutes on 2 quiet cores)
# make test-all        the slow ones, too (30 minutes on 2 cores)
# make test-nightly    all that need no GPU: kills, jobs of several machines, planted mistakes, machine code
# make fuzz            10,000 random layers, called in random ways, beside the definition
# make soak            10,000 steps that change, and what they leave in memory (5 minutes)
# make test-versions   a part of them with the oldest and the newest Python, torch and transformers
# make wheel   wheels in dist/, one without CUDA kernels and one with them, each used in an empty environment
# make docs    build the documentation: build/docs/index.html
# make gpu PYTHON=/path/to/python   check and measure on a GPU, with that Python's own torch
# make gpu-ladder PYTHON=...        its first part: small steps that name what is wrong, and one report
# make gpu-nccl PYTHON=...          tests of several ranks over NCCL, on one GPU or several
# make gpu-first PYTHON=...         what to know first of a GPU, in 10 minutes; "make gpu-build" comes before it
#
# CUDA kernels take nvcc 8 minutes. make test compiles them only where there is a GPU, where they were compiled
# before, or when asked; without them it skips the few tests that read them:
#   make test EXTENSION=1
#
# A GPU-less machine whose pip would download a CUDA build of torch can ask for the CPU build:
#   make train TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
RANKS ?=
ARGS ?=
PYTEST_ARGS ?= -n 2

# Python,torch,transformers, the oldest and the newest that were had: each is tested in an environment of its own,
# .venv-versions/. pythonX.Y is looked for on PATH. The releases in it are those of pmoe.warn.TESTED.
VERSIONS ?= 3.10,2.13.0,5.23.0 3.11,2.13.0,5.23.0 3.13,2.14.1,5.24.0

# One thread per process: the ranks of a test or of a training run share the cores. Compiled modules are kept:
# where they are not, each of some hundred processes compiles all of pmoe, an eighth of the tests' time.
OMP := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.PHONY: help setup extension browser docs train wheel test test-all test-nightly fuzz soak test-versions lint format bench clean FORCE
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ---- .venv ---------------------------------------------------------------------------------------
# .venv belongs to this Makefile. .venv/home is written last and names this directory, so an
# interrupted set-up and a .venv copied from elsewhere are both seen, and made anew.

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/installed-$(shell printf %s '$(TORCH)' | tr -c 'A-Za-z0-9.' _)

# 1: keep pmoe/_cuda.* up to date with its sources. 0: leave it, or its absence, as it is.
EXTENSION ?= $(if $(wildcard /dev/nvidia[0-9]* pmoe/_cuda.*),1,0)
WANTED_EXTENSION := $(if $(filter 1,$(EXTENSION)),extension)

setup: $(STAMP) $(WANTED_EXTENSION)

ifneq ($(shell cat .venv/home 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
$(STAMP): setup.py pyproject.toml Makefile
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
		echo "pmoe needs Python 3.10 or newer, and PYTHON=$(PYTHON) is not: make PYTHON=/path/to/python" >&2
		exit 1
	fi
	if [ "$$(cat .venv/home 2>/dev/null)" != "$(CURDIR)" ]; then
		rm -rf .venv
		if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then
			"$(PYTHON)" -m venv .venv
		elif command -v virtualenv >/dev/null; then
			virtualenv -q -p "$(PYTHON)" .venv
		else
			echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2
			exit 1
		fi
	fi
	rm -f .venv/installed-*
	# torch first and by itself; what follows is then held to the build that came.
	$(PIP) install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> .venv/constraints.txt
	# Without kernels: "extension" builds those in place, with its own messages and what is in .venv.
	PMOE_CUDA=0 $(PIP) install -q -c .venv/constraints.txt -e '.[dev,train]'
	$(BIN)/python -c 'import numpy, torch'
	echo "$(CURDIR)" > .venv/home
	touch $@

# pmoe/_cuda.*, in place. setup.py knows what changed, the compiler included; where nothing did, or where there
# is no nvcc, this takes less than a second.
extension: $(STAMP)
	@$(BIN)/python setup.py -q build_ext --inplace

# Debian's browser, for the tests that look at pages.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
	sudo=$$([ "$$(id -u)" = 0 ] || echo sudo)
	$$sudo apt-get update -qq
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		chromium chromium-driver fonts-dejavu-core >/dev/null

# fairseq's environment, for the tests of the plugin: it wants an older numpy. Its last file is written last.
FAIRSEQ := .venv-fairseq/requirements.txt
$(FAIRSEQ): tests/fairseq/requirements.txt tests/fairseq/environment.sh
	@TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/fairseq/environment.sh .venv-fairseq "$(PYTHON)"

.PHONY: .venv-fairseq
.venv-fairseq: $(FAIRSEQ)

# Other systems' packages, beside .venv's own, for the tests of pmoe.convert and of the integrations with Megatron-Core
# and DeepSpeed. The last file is written last.
CONVERT := .venv-convert/requirements.txt
$(CONVERT): tests/convert/requirements.txt tests/convert/environment.sh $(STAMP)
	@bash tests/convert/environment.sh .venv-convert $(BIN)/python

.PHONY: .venv-convert
.venv-convert: $(CONVERT)

# NVSHMEM's package (180 MB). Only nightly tests use it: they compile kernels and link them with it. The list of
# packages is copied last, so that an interrupted installation starts again.
NVSHMEM := .venv-nvshmem/requirements.txt
$(NVSHMEM): tests/cuda/nvshmem/requirements.txt $(STAMP)
	@rm -rf .venv-nvshmem
	mkdir .venv-nvshmem
	echo "*" > .venv-nvshmem/.gitignore
	$(PIP) install -q --no-deps --target .venv-nvshmem -r tests/cuda/nvshmem/requirements.txt
	cp tests/cuda/nvshmem/requirements.txt $@

.PHONY: .venv-nvshmem
.venv-nvshmem: $(NVSHMEM)

# ---- every machine -------------------------------------------------------------------------------

train: $(STAMP)
	@ranks=$(RANKS)
	[ -n "$$ranks" ] || ranks=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')
	# 127.0.0.1 and a free port: a machine's own name need not resolve, 29500 may be taken.
	$(OMP) $(BIN)/python examples/lm_launch.py --standalone --local-addr=127.0.0.1 --nproc_per_node=$$ranks \
		examples/train_lm.py $(ARGS)

# What each level leaves out is also in tests/levels.py, for the planted mistakes.
test: $(STAMP) $(WANTED_EXTENSION) browser
	@$(if $(WANTED_EXTENSION),,echo "make test: no CUDA kernels are compiled; make test EXTENSION=1 compiles and reads them")
	$(OMP) $(BIN)/python -m pytest tests -m "not slow and not nightly and not gpu" $(PYTEST_ARGS)

# Random layers, called in random ways, beside the definition: some 20 minutes.
fuzz: $(STAMP) $(WANTED_EXTENSION)
	@$(OMP) $(BIN)/python -m tests.fuzz $(ARGS)

soak: $(STAMP) $(WANTED_EXTENSION)
	@$(OMP) $(BIN)/python -m tests.soak $(ARGS)

test-versions:
	@bash tests/versions.sh $(VERSIONS)

wheel:
	@TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/wheel.sh "$(PYTHON)"

# One more at a time than there are cores: many of the slow ones wait for a peer that is dead.
test-all test-nightly: PYTEST_ARGS = -n 3
test-all: $(STAMP) extension browser $(FAIRSEQ) $(CONVERT)
	@$(OMP) $(BIN)/python -m pytest tests -m "not nightly and not gpu" $(PYTEST_ARGS)

test-nightly: $(STAMP) extension browser $(FAIRSEQ) $(CONVERT) $(NVSHMEM)
	@$(OMP) $(BIN)/python -m pytest tests -m "not gpu" $(PYTEST_ARGS)

CPP = $(filter-out %.pyc,$(wildcard cuda/*.[hc]* cuda/*/*.[hc]* tests/cuda/*.[hc]* tests/cuda/*/*.[hc]*))

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy --strict pmoe
	$(BIN)/mypy --config-file tests/gpu/mypy.ini tests/gpu

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

docs: $(STAMP)
	@$(OMP) $(BIN)/python -m sphinx -q -W --keep-going -E docs build/docs
	echo "build/docs/index.html"

bench: $(STAMP)
	@$(OMP) $(BIN)/python bench/bench_overlap.py --link modelled $(ARGS)

clean:
	rm -rf .venv .venv-convert .venv-fairseq .venv-gpu .venv-nvshmem .venv-versions .venv-wheel build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f pmoe/_cuda.* pmoe/_nvshmem.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- a machine with a GPU ------------------------------------------------------------------------
# PYTHON is the machine's own and is never changed. What it lacks goes into .venv-gpu, from wheels/
# where there is such a folder, else from the package index. pmoe itself is found by PYTHONPATH.

.PHONY: gpu gpu-env gpu-build gpu-ladder gpu-nccl gpu-first gpu-test gpu-sanitize gpu-bench gpu-comet
GPU_PYTHON = $$([ -x .venv-gpu/bin/python ] && echo .venv-gpu/bin/python || echo "$(PYTHON)")
GPU_RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$(GPU_PYTHON)"

define NEED_CUDA
import sys
try:
    import torch
except ImportError:
    sys.exit(f"make gpu: not run, {sys.executable} has no torch: make gpu PYTHON=/path/to/python")
if not torch.cuda.is_available():
    sys.exit(f"make gpu: not run, torch {torch.__version__} of {sys.executable} sees no CUDA device")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.executable}")
endef

define MISSING
import importlib.util, sys
print(*[name.replace("_", "-") for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
endef

define IDENTITY
import importlib.util, sys
print(sys.version, importlib.util.find_spec("torch").origin)
endef

# PYTHON may itself be in a virtual environment, which --system-site-packages does not look into.
define LINK_SITES
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
endef

define CONSTRAINTS
import importlib.metadata as metadata
for name in ("torch", "numpy"):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
endef

define FIND_SANITIZER
import glob, os, shutil, sys
found = [shutil.which("compute-sanitizer") or ""]
for place in ["/usr/local/cuda*/bin", *[path + "/nvidia/**" for path in sys.path if "packages" in path]]:
    found += sorted(glob.glob(place + "/compute-sanitizer", recursive=True), reverse=True)
print(next((path for path in found if os.path.isfile(path) and os.access(path, os.X_OK)), ""))
endef

define FIND_CUOBJDUMP
import shutil
from tests.cuda.disassembly import _path
print(shutil.which("cuobjdump", path=_path()) or "")
endef
export NEED_CUDA MISSING IDENTITY LINK_SITES CONSTRAINTS FIND_SANITIZER FIND_CUOBJDUMP

gpu: gpu-build gpu-ladder gpu-test gpu-sanitize gpu-bench gpu-comet

gpu-env:
	@command -v "$(PYTHON)" >/dev/null || { echo "make gpu: no PYTHON=$(PYTHON) here" >&2; exit 1; }
	"$(PYTHON)" -W ignore -c "$$NEED_CUDA"
	needs="numpy sortedcontainers setuptools pytest pytest_timeout matplotlib"
	if [ -z "$$("$(PYTHON)" -c "$$MISSING" $$needs)" ]; then
		rm -rf .venv-gpu
		exit 0
	fi
	py=.venv-gpu/bin/python
	same=$$("$(PYTHON)" -c "$$IDENTITY")
	if [ "$$($$py -c "$$IDENTITY" 2>/dev/null)" != "$$same" ]; then
		rm -rf .venv-gpu
		if ! "$(PYTHON)" -m venv --without-pip --system-site-packages .venv-gpu; then
			rm -rf .venv-gpu
			echo "make gpu: no virtual environment could be made, going on with $(PYTHON)" >&2
			exit 0
		fi
		site=$$($$py -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
		"$(PYTHON)" -c "$$LINK_SITES" > "$$site/machine.pth"
	fi
	$$py -m pip --version >/dev/null 2>&1 || $$py -m ensurepip >/dev/null 2>&1 || true
	"$(PYTHON)" -c "$$CONSTRAINTS" > .venv-gpu/constraints.txt
	# One by one: matplotlib may be out of reach where pytest is not. Few retries: there may be no network.
	for name in $$($$py -c "$$MISSING" $$needs); do
		install="$$py -m pip install -q --disable-pip-version-check -c .venv-gpu/constraints.txt $$name"
		[ -d wheels ] && $$install --no-index --find-links wheels 2>/dev/null && continue
		$$install --retries 1 --timeout 10 || echo "make gpu: could not install $$name" >&2
	done

# The extension of another Python stays beside this one's. A GPU without nvcc is an error, unless PMOE_CUDA=0.
gpu-build: gpu-env
	@missing=$$("$(GPU_PYTHON)" -c "$$MISSING" numpy sortedcontainers setuptools pytest pytest_timeout)
	if [ -n "$$missing" ]; then
		echo "make gpu-build: missing $$missing; put their wheels into wheels/ and run this again" >&2
		exit 1
	fi
	if ! PMOE_CUDA=$${PMOE_CUDA:-1} $(GPU_RUN) setup.py -q build_ext --inplace; then
		echo "make gpu-build: the CUDA kernels could not be built, see above; PMOE_CUDA=0 does without them" >&2
		exit 1
	fi
	$(GPU_RUN) -c 'import pmoe; print("make gpu-build: ready, pmoe", pmoe.__version__)'
	$(GPU_RUN) -c 'from pmoe.kernels import status; print(status())'

# Each part below ends by itself before 8 minutes, whatever hangs. A kernel that hangs holds its test in a wait that
# no signal ends; timeout_method=thread ends that test's process. What fails does not keep the rest from running.
GPU_PYTEST = -m pytest -q -o timeout_method=thread
GPU_PYTEST_ARGS = $$("$(GPU_PYTHON)" -c 'import xdist' 2>/dev/null && echo "$(PYTEST_ARGS)" \
	|| echo "$(filter-out -n 2,$(PYTEST_ARGS))")
QUICK = not slow and not nightly
KERNEL_TESTS = tests/unit/test_disassembly.py $(wildcard tests/unit/test_kernels_*.py)
COMET_TESTS = $(wildcard tests/gpu/test_comet*.py) tests/gpu/test_persistent.py
SANITIZED = $(wildcard tests/gpu/test_grouped_gemm*.py) tests/gpu/test_permute.py tests/gpu/test_route.py $(COMET_TESTS)

# Each step in a process of its own, which ends whatever hangs; the limit here is for the ladder itself.
gpu-ladder: gpu-build
	@export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	timeout -k 5 478 "$(GPU_PYTHON)" -m tests.gpu.ladder

# Tests of several ranks, which gloo carries elsewhere (tests/backend.py), one after the other: their processes share
# the GPU. The first file that fails tells most.
NCCL_TESTS = $(foreach one,specification behaviour streams padded reuse flexible checkpoint parallelize reducer faults \
	kills,tests/gloo/test_$(one).py)
gpu-nccl: gpu-build
	@export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	PMOE_TESTS_BACKEND=nccl timeout -k 5 478 "$(GPU_PYTHON)" $(GPU_PYTEST) $(NCCL_TESTS) -m "$(QUICK)"

# Builds nothing, so that no minute of a GPU goes by: make gpu-build first, or bring pmoe/_cuda.* along.
gpu-first: gpu-env
	@export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	timeout -k 5 640 "$(GPU_PYTHON)" -m tests.gpu.first_minutes

# First, where there is a disassembler, the machine code that was just built: those tests need no GPU.
gpu-test: gpu-build
	@failed=0
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	if [ -n "$$("$(GPU_PYTHON)" -c "$$FIND_CUOBJDUMP")" ]; then
		timeout -k 5 100 "$(GPU_PYTHON)" $(GPU_PYTEST) $(KERNEL_TESTS) -m "$(QUICK)" $(GPU_PYTEST_ARGS) || failed=1
	else
		echo "make gpu-test: the machine code is not looked at, cuobjdump is not on this machine"
	fi
	timeout -k 5 360 "$(GPU_PYTHON)" $(GPU_PYTEST) tests/gpu -m gpu $(COMET_TESTS:%=--ignore=%) \
		$(GPU_PYTEST_ARGS) || failed=1
	exit $$failed

# memcheck: without torch's caching allocator every tensor is an allocation of its own, so an access past its end
# is seen. racecheck looks at shared memory, and at pmoe's kernels only.
gpu-sanitize: gpu-build
	@tool=$$("$(GPU_PYTHON)" -c "$$FIND_SANITIZER")
	if [ -z "$$tool" ]; then
		echo "make gpu-sanitize: not run, compute-sanitizer is not on this machine"
		exit 0
	fi
	probe=$$("$$tool" "$(GPU_PYTHON)" -c 'import torch; torch.ones(1, device="cuda")' 2>&1 || true)
	if grep -qi 'device not supported' <<< "$$probe"; then
		echo "make gpu-sanitize: not run, $$tool says that it does not support this device"
		exit 0
	fi
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	failed=0
	check="$$tool --target-processes all --error-exitcode 1"
	tests="$(GPU_PYTEST) -o timeout=200 $(GPU_PYTEST_ARGS)"
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 230 $$check --tool memcheck --report-api-errors no \
		"$(GPU_PYTHON)" $$tests tests/gpu -m "gpu and sanitize" || failed=1
	[ "$${PMOE_CUDA:-1}" != 0 ] || exit $$failed
	timeout -k 5 210 $$check --tool racecheck --kernel-name kns=pmoe \
		"$(GPU_PYTHON)" $$tests $(SANITIZED) -m "gpu and sanitize" || failed=1
	exit $$failed

# Each with its seconds. ARGS go to those that take --rounds. The kernels' own benchmarks come first.
gpu-bench: gpu-build
	@failed=0
	each="gpu:90"
	[ "$${PMOE_CUDA:-1}" = 0 ] || each="grouped_gemm:115 beside:40 alone:80 permute:65 $$each"
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	for one in $$each; do
		timeout -k 5 $${one#*:} "$(GPU_PYTHON)" bench/bench_$${one%:*}.py --out bench/results $(ARGS) || failed=1
	done
	timeout -k 5 70 "$(GPU_PYTHON)" bench/bench_gpu_memory.py --out bench/results || failed=1
	exit $$failed

# The fused kernels: their machine code, where there is a disassembler, their tests, and their benchmark.
gpu-comet: gpu-build
	@failed=0
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
	[ "$${PMOE_CUDA:-1}" != 0 ] || exit 0
	if [ -n "$$("$(GPU_PYTHON)" -c "$$FIND_CUOBJDUMP")" ]; then
		timeout -k 5 60 "$(GPU_PYTHON)" $(GPU_PYTEST) tests/unit/test_comet_kernels.py -m "$(QUICK)" \
			$(GPU_PYTEST_ARGS) || failed=1
	fi
	timeout -k 5 220 "$(GPU_PYTHON)" $(GPU_PYTEST) $(COMET_TESTS) -m gpu $(GPU_PYTEST_ARGS) || failed=1
	for one in comet:90 flashdmoe:90; do
		timeout -k 5 $${one#*:} "$(GPU_PYTHON)" bench/bench_$${one%:*}.py --out bench/results $(ARGS) || failed=1
	done
	exit $$failed
