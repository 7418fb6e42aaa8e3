# Each target sets up what it needs in .venv, again whenever pyproject.toml or constraints.txt change.
#   PYTHON=python3.12    the interpreter .venv is made with
#   TORCH=torch==X.Y.Z   another build of torch; PIP_EXTRA_INDEX_URL and its like reach pip as usual

PYTHON ?= $(or $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done), \
	$(error Python 3.11 or newer is needed: install it, or name it by PYTHON=...))

# On Linux an unqualified torch brings several GB of CUDA, which is of no use without a GPU.
LOCAL := $(if $(filter Linux,$(shell uname -s)),$(if $(wildcard /dev/nvidiactl),,+cpu))
KILLS ?= 100
CORES := $(shell nproc 2>/dev/null || echo 2)
STEPS ?= 50000
SECONDS ?= 3600
# What this library needs and a machine with torch may lack; its own wheel says which media there are.
GPU_KIT := aiofiles annotated-types pydantic pydantic-core pydantic-settings python-dotenv structlog typing-inspection xxhash
GPU_PYTHON ?= 3.12
GPU_PLATFORM ?= manylinux2014_x86_64
TORCH ?= $(shell sed -n 's/^torch==.*/&/p' constraints.txt)$(LOCAL)

IN_VENV := .venv/bin/
PIP := $(IN_VENV)python -m pip --disable-pip-version-check --quiet
BENCHMARKS := $(sort $(wildcard benchmarks/[a-z]*.py))

.PHONY: help demo test test-fast test-engines test-gpu gpu gpu-kit image fuzz simulate torture kills soak mutate planted check bench fault-bench screenshots dist docs clean
.NOTPARALLEL:
.SUFFIXES:
# A stamp is kept although only patterns name it.
.PRECIOUS: .venv/%.stamp

help:
	@echo "make demo       a chat server on a small model: cold, from GPU pool, CPU, and NVMe in a new process"
	@echo "                ... TIERS=s3,redis: from those, see examples/chat_servers.py"
	@echo "                ... HOST=1: two engines that share the cache of one server, see examples/chat_host.py"
	@echo "make test       all tests"
	@echo "make test-fast  the fast tests: no servers, no examples"
	@echo "make test-engines  vLLM and other engines, each in an environment of its own: gigabytes once, then minutes"
	@echo "                ... ENGINES='-k vllm': one of them"
	@echo "make test-gpu   the tests of memory and copies, on a GPU, and every kernel for every GPU; says what was skipped"
	@echo "make gpu        make test-gpu, then benchmarks/gpu.py: what a GPU is to tell, ready for benchmarks/RESULTS.md"
	@echo "make image      what deploy/host/Containerfile says, done without a container engine; as root on Linux"
	@echo "make gpu-kit    .gpu-kit/: what .ci/on_gpu needs on a GPU machine without network; GPU_PYTHON=3.12"
	@echo "make fuzz       a million damaged inputs for each reader of what comes from outside, perhaps an hour"
	@echo "make simulate   the library in virtual time on media that fail, some two minutes; STEPS=500000"
	@echo "make torture    a million steps of that, 20,000 examples of the test of the whole face, for hours, and make fuzz"
	@echo "make kills      kill -9 of caches at work, 100 of each kind of tier, some 10 minutes; KILLS=500"
	@echo "make soak       an hour each of a cache and of a server, while files are damaged, processes killed: nothing may grow; SECONDS=600"
	@echo "make mutate     how many faults planted in the library the tests find, for hours; PACKAGE=tiers SAMPLE=50 minutes"
	@echo "make planted    how many seeds the simulation needs to find each of the bugs planted for it, for hours; ONLY=\"name\" a minute"
	@echo "make check      ruff, mypy, import contracts, and the wheel installed without extras"
	@echo "make bench      every benchmark, each with its ceiling"
	@echo "make fault-bench  sixteen classes of faults, on tiers of ours and of vLLM, LMCache and SGLang, each in an"
	@echo "                ... environment of its own; TIERS='nvme vllm_fs': these"
	@echo "make screenshots  the pictures in docs/images: the page in headless Chromium, the dashboard's panels asked of Prometheus"
	@echo "make dist       the wheel and the source distribution, as they would be published, in dist/"
	@echo "make docs       the documentation, in site/"
	@echo "make clean      removes what these made, except .venv"

.venv/%.stamp: pyproject.toml constraints.txt
	@echo "Setting up .venv for '$*' (the first time this downloads $(TORCH) and takes minutes) ..."
	@test -x $(IN_VENV)pip || $(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt '$(TORCH)' || { \
		echo "No $(TORCH) for $$($(IN_VENV)python -V) at the package indexes pip knows; taking $(TORCH:+cpu=) instead."; \
		echo "(PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu would save the download of CUDA.)"; \
		$(PIP) install -c constraints.txt '$(TORCH:+cpu=)'; }
	@$(PIP) install -c constraints.txt -e '.[$*]'
	@touch $@

.venv/servers: .ci/install_servers
	@mkdir -p $(@D) && .ci/install_servers && touch $@

demo: .venv/demo.stamp
	$(IN_VENV)python examples/$(if $(HOST),chat_host.py,chat.py) $(if $(TIERS),--tiers $(TIERS))

# Where this is set, every process that tests would rewrite the asserts of all tests anew, and compile the library.
test test-fast: export PYTHONDONTWRITEBYTECODE :=

test: .venv/dev.stamp .venv/servers
	$(IN_VENV)pytest -n auto --dist loadgroup

test-fast: .venv/dev.stamp
	$(IN_VENV)pytest -n auto -m "not slow" --ignore=tests/servers --ignore=tests/examples --ignore=tests/test_docs.py

test-engines: .venv/dev.stamp
	$(IN_VENV)pytest tests/engines --engines --timeout 1200 $(ENGINES)

test-gpu: .venv/dev.stamp
	ALL_KERNELS=1 $(IN_VENV)pytest tests/gpu tests/memory

gpu: .venv/dev.stamp
	@$(MAKE) test-gpu; tests=$$?; $(IN_VENV)python benchmarks/gpu.py; exit $$((tests + $$?))

image: .venv/dev.stamp
	$(IN_VENV)python .ci/image_steps.py

gpu-kit: .venv/dev.stamp
	rm -rf .gpu-kit
	$(PIP) download --no-deps --only-binary :all: --python-version $(GPU_PYTHON) --platform $(GPU_PLATFORM) \
		-c constraints.txt -d .gpu-kit $(GPU_KIT)
	$(PIP) wheel --no-deps --no-build-isolation -w .gpu-kit .
	@du -sh .gpu-kit

fuzz: .venv/dev.stamp
	$(IN_VENV)pytest tests/fuzz --hypothesis-profile torture --timeout 0 --durations 0

simulate: .venv/dev.stamp
	$(IN_VENV)tiered-kv simulate --steps $(STEPS) --processes $(CORES)

torture: fuzz
	$(IN_VENV)tiered-kv simulate --steps 1000000 --processes $(CORES)
	$(IN_VENV)pytest tests/cache/test_model.py tests/cache/test_model_mutations.py --hypothesis-profile torture --timeout 0

kills: .venv/dev.stamp
	$(IN_VENV)pytest tests/cache/test_kills.py tests/host/test_kills.py --kills $(KILLS) --timeout 0 -rP

soak: .venv/dev.stamp
	$(IN_VENV)pytest tests/cache/test_soak.py tests/host/test_soak.py --soak $(SECONDS) -rP

mutate: .venv/mutate.stamp
	nice $(IN_VENV)python .ci/mutate.py $(if $(PACKAGE),--package $(PACKAGE)) $(if $(SAMPLE),--sample $(SAMPLE)) \
		$(if $(SEED),--seed $(SEED))

planted: .venv/dev.stamp
	nice $(IN_VENV)python -m tests.testing.planted --json $(if $(AIMED),--aimed --ranges 1) $(if $(ONLY),--only "$(ONLY)",--write)

check: .venv/dev.stamp
	$(IN_VENV)ruff check .
	$(IN_VENV)ruff format --check .
	$(IN_VENV)mypy
	$(IN_VENV)lint-imports
	$(IN_VENV)python .ci/check_wheel.py

dist: .venv/dev.stamp
	$(IN_VENV)python -m build --no-isolation

bench: .venv/dev.stamp
	@for benchmark in $(BENCHMARKS); do echo "== $$benchmark"; $(IN_VENV)python $$benchmark || exit 1; done

fault-bench: .venv/dev.stamp
	nice $(IN_VENV)python benchmarks/faults/run.py --build $(foreach tier,$(TIERS),--tier $(tier))

screenshots: .venv/dev.stamp
	$(IN_VENV)python .ci/screenshots.py
	$(IN_VENV)python .ci/dashboard.py
	$(IN_VENV)python .ci/terminal.py

docs: .venv/docs.stamp
	$(IN_VENV)mkdocs build --strict

clean:
	rm -rf build dist out site .gpu-kit .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
