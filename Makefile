# `make train` and `make test` do everything from a fresh clone on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
KILLS ?= 100
# Modules are compiled where they are first imported: half a minute of a core less for every torch.
export PIP_COMPILE := no
DEFAULT := not slow and not vllm and not mutants and not trl and not adapters and not virtual_gpu
FAST := not process and not seconds and $(DEFAULT)

VLLM_IS_FOR_THIS = [ "$$($(PYTHON) -c 'import platform, sys; print(sys.platform, platform.machine(), *sys.version_info[:2])')" = "linux x86_64 3 11" ]

.PHONY: train test quick test-process docs docs-version check-docs test-all environments test-slow sweeps test-peers test-browser chromium plotly test-trl test-trl-here trl-learning test-adapters test-vllm test-vllm-here test-sglang test-torch mutants starters soak soak-distributed study bench gpu gpu-wheels gpu-compile virtual-gpu dist release lint check-lint types lock clean

train: $(VENV)/ready
	$(BIN)/jackpot train quickstart $(ARGS)

test: $(VENV)/ready  # in two processes; with ARGS in one, as -s, -x and --pdb need it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/pytest $(or $(ARGS),--numprocesses 2 --dist worksteal --ignore tests/mutants)

quick: $(VENV)/ready  # formulas, settings and models in one process, within a minute: while you work
	OMP_NUM_THREADS=1 $(BIN)/pytest -m '$(FAST)' tests/core tests/config tests/objectives tests/models $(ARGS)

test-process: $(VENV)/ready  # what `make test` runs of tests that start processes
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'process and $(DEFAULT)' $(ARGS)

check-docs: $(VENV)/ready  # pages, recipes and committed results agree with the code
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/check_docs $(ARGS)

docs: $(VENV)-docs/ready  # the pages as a site in site/; a dead link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
docs-version: $(VENV)-docs/ready  # the site as the version 0.2 and as `latest`, beside earlier ones, on the local branch gh-pages; nothing is uploaded
	export PATH="$(abspath $(VENV)-docs/bin):$$PATH" NO_MKDOCS_2_WARNING=1; \
	mike deploy --update-aliases $(basename $(VERSION)) latest && mike set-default latest

test-all: $(VENV)/ready
	-$(MAKE) --no-print-directory chromium
	-$(MAKE) --no-print-directory $(VENV)-axe/ready
	-$(MAKE) --no-print-directory $(VENV)-docs/ready  # without it the test that builds the site says that it was skipped
	-$(BIN)/pip install --quiet triton==3.7.1  # the one of torch 2.13, 190 MB; without it the tests of its kernels say that they were skipped
	-$(BIN)/pip install --quiet -c constraints.txt ray  # 80 MB; without it the test of a run that Ray places says that it was skipped
	-$(BIN)/pip install --quiet -c constraints.txt reasoning-gym  # 10 MB; without it the tests of its task say that they were skipped
	-$(BIN)/pip install --quiet -c constraints.txt wandb  # 30 MB; without it the tests of tracking say that they were skipped
	-$(BIN)/pip install --quiet -c constraints.txt nbclient ipykernel 'readme-renderer[md]'  # 10 MB; without it the tests of the notebook and of the page on an index say that they were skipped
	status=0; $(MAKE) --no-print-directory --jobs=2 --keep-going test-slow environments || status=1; \
	$(MAKE) --no-print-directory --jobs=2 --keep-going test-trl-here test-adapters || status=1; \
	$(MAKE) --no-print-directory test-vllm || status=1; exit $$status  # none hides another

environments: $(VENV)/ready  # of the last three targets of test-all: downloads, while the slow tests have the processors
	-$(MAKE) --no-print-directory $(VENV)-trl/ready
	-$(MAKE) --no-print-directory $(VENV)-adapters/ready
	-$(VLLM_IS_FOR_THIS) && $(MAKE) --no-print-directory $(VENV)-vllm/ready

test-slow: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'slow and not vllm and not sweep' --numprocesses 2 --dist loadfile $(ARGS)

sweeps: $(VENV)/ready  # further cases of the slow tests and of vLLM's: every recipe, every kind of kill, whole runs that learn
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'slow and sweep and not vllm' --numprocesses 2 --dist loadfile $(ARGS)
	if $(VLLM_IS_FOR_THIS); then $(MAKE) --no-print-directory $(VENV)-vllm/ready && \
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest -m 'vllm and sweep' --numprocesses 2 --dist loadfile $(ARGS); fi
	JACKPOT_EXAMPLES=2000 OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/system/test_strangers.py $(ARGS)
	$(MAKE) --no-print-directory test-trl ARGS="-m 'trl and sweep'"

test-peers: $(VENV)/ready $(VENV)-peers/ready  # verl, TRL and AReaL still answer what tests/peers has recorded of them; `make test` compares with the record
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/peers $(ARGS)

test-browser: $(VENV)/ready chromium  # the report's page, as somebody reads it
	-$(MAKE) --no-print-directory $(VENV)-axe/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/ui/report $(ARGS)

chromium:  # without it the tests of the page say that they were skipped
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; \
	then :; elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
	then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else echo "no chromium, and no right to install one: tests of the report's page are skipped"; fi

PLOTLY := 4.1.1
plotly:  # the library that draws the page's charts, from npm; it is committed, so that nobody else needs npm
	cd src/jackpot/ui/assets && npm pack --silent plotly.js-basic-dist-min@$(PLOTLY) && \
	tar -xzOf plotly.js-*.tgz package/plotly-basic.min.js | gzip -9n >plotly-basic.min.js.gz && \
	tar -xzOf plotly.js-*.tgz package/LICENSE >plotly.LICENSE && rm plotly.js-*.tgz

test-trl: $(VENV)/ready $(VENV)-trl/ready  # the adapters inside the oldest and the newest TRL that are supported
	PYTHONPATH=$(VENV)-trl/oldest OMP_NUM_THREADS=1 $(BIN)/pytest -m trl tests/adapters $(ARGS)
	PYTHONPATH=$(VENV)-trl/newest OMP_NUM_THREADS=1 $(BIN)/pytest -m trl tests/adapters $(ARGS)

test-trl-here:
	-$(MAKE) --no-print-directory $(VENV)-trl/ready
	if [ -e $(VENV)-trl/ready ]; then $(MAKE) --no-print-directory test-trl ARGS="-m 'trl and not sweep'"; else echo "TRL cannot be had: skipped"; fi

test-adapters: $(VENV)/ready  # our corrections inside other frameworks; tests of what cannot be had say that they were skipped
	-$(MAKE) --no-print-directory $(VENV)-adapters/ready
	PYTHONPATH=$(VENV)-adapters/verl-oldest:$(VENV)-adapters/common OMP_NUM_THREADS=1 $(BIN)/pytest -m adapters tests/adapters/verl $(ARGS)
	PYTHONPATH=$(VENV)-adapters/verl-newest:$(VENV)-adapters/common OMP_NUM_THREADS=1 $(BIN)/pytest -m adapters tests/adapters/verl $(ARGS)
	PYTHONPATH=$(VENV)-adapters/others:$(VENV)-adapters/common OMP_NUM_THREADS=1 $(BIN)/pytest -m adapters tests/adapters/recipes $(ARGS)

trl-learning: $(VENV)/ready $(VENV)-trl/ready  # docs/trl.md: the quickstart in our trainer and inside TRL, three seeds each, about 15 minutes of CPU
	$(BIN)/python benchmarks/trl_learning.py --trl $(VENV)-trl/newest $(ARGS)

test-vllm:  # a real vLLM on the CPU, where its package is for this machine
	@if $(VLLM_IS_FOR_THIS); then $(MAKE) --no-print-directory test-vllm-here; \
	else echo "vLLM's CPU package is for Linux x86-64 and Python 3.11: skipped"; fi

test-vllm-here: $(VENV)-vllm/ready
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest -m 'vllm and not sweep' --numprocesses 2 --dist loadfile $(ARGS)

test-sglang: $(VENV)-sglang/ready  # a real server of SGLang on the CPU; its torch is another one, of some gigabytes
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/rollout/engines/sglang $(ARGS)

TORCH ?= 2.11.0
test-torch: $(VENV)-torch-$(TORCH)/ready  # the default tests on another torch: make test-torch TORCH=2.14.1; 5 GB, since the registry has CUDA builds
	OMP_NUM_THREADS=1 $(VENV)-torch-$(TORCH)/bin/pytest -W 'ignore:torch is built for CUDA' \
	$(or $(ARGS),--numprocesses 2 --dist worksteal --ignore tests/check_docs --ignore tests/mutants)

mutants: $(VENV)/ready  # formulas and drawn code broken on purpose, one at a time: a test must notice
	OMP_NUM_THREADS=1 $(BIN)/pytest -m mutants tests/mutants $(ARGS)

starters: $(VENV)/ready  # the starters of the package are made again from nothing, with the same accuracy: before a change of what makes them
	JACKPOT_STARTERS=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/system/test_quickstart.py

soak: $(VENV)/ready  # runs of every regime, killed 100 times in all at random moments; KILLS=1000 for more
	JACKPOT_SOAK_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -s tests/system/test_soak.py

soak-distributed: KILLS = 20
soak-distributed: $(VENV)/ready  # two ranks, a random one killed 20 times; then 1,000 iterations with two engines and faults of all kinds
	JACKPOT_RANK_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -s tests/system/test_rank_kills.py
	JACKPOT_FAULT_ITERATIONS=1000 JACKPOT_FAULT_EVERY=25 OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -s tests/system/test_injected_faults.py

study: $(VENV)/ready  # docs/study.md: runs what docs/study/*.jsonl lacks, hours if they are empty, and writes the page, and how often the advice was right into docs/replay.md
	OMP_NUM_THREADS=1 $(BIN)/python -m research.study
	$(BIN)/python -m research.study_page
	$(BIN)/python -m research.advice --write

bench: $(VENV)/ready $(VENV)-peers/ready  # docs/benchmarks.md: measures what docs/benchmarks/*.jsonl lacks, hours, and writes the page, and how often the advice was right into docs/replay.md
	$(BIN)/python benchmarks/all.py $(ARGS)

PART ?= check
gpu:  # docs/gpu.md: PART=check, runs, head, step, attention, decode, sync, fsdp, fp8 or all, on one GPU; ARGS=--tiny on a CPU
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py $(PART) $(ARGS)

gpu-wheels:  # what a GPU machine without a network may lack, to carry there
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py wheels

gpu-compile: $(VENV)/ready  # the Triton kernels for five kinds of GPUs, without one: registers, and an error where they spill
	-$(BIN)/pip install --quiet triton==3.7.1  # the one of torch 2.13
	$(BIN)/python -m tools.compile_kernels $(ARGS)

virtual-gpu: $(VENV)/ready  # what a first run on a GPU would trip over, on a GPU that g++ builds for the CPU build of torch
	$(BIN)/python tests/virtual_gpu/build.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m virtual_gpu tests/virtual_gpu $(ARGS)

dist: $(VENV)/ready  # what a release uploads; tests/system/test_wheel.py installs it in clean environments
	$(BIN)/pip install --quiet -c constraints.txt build twine 'readme-renderer[md]'
	rm -rf build dist && $(BIN)/python -m build --no-isolation && $(BIN)/twine check --strict dist/*

release: $(VENV)/ready  # all of a release but the upload: version, changelog, clean tree, `make quick`, `make dist`, the wheel in a fresh environment, digests
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.release

lint: $(VENV)/ready  # formats, mends and checks: style, spelling, types
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/codespell
	$(MAKE) --no-print-directory types

types: $(VENV)/ready  # src at the level basic; core, objectives and the public names in strict
	-$(BIN)/pip install --quiet triton==3.7.1  # without it nothing is known of its kernels
	$(BIN)/basedpyright
	$(BIN)/basedpyright --project tools/pyright_strict.json --pythonpath $(BIN)/python

check-lint: $(VENV)/ready  # what .pre-commit-config.yaml runs, on all files and without a change
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(MAKE) --no-print-directory types

lock: $(VENV)/ready  # every version of `.[train,dev]`, for `pip install -r requirements-dev.lock`; no host of an index in it
	$(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --extra train --extra dev -c constraints.txt \
	--no-emit-index-url --custom-compile-command "make lock" --upgrade -o requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) $(VENV)-peers $(VENV)-trl $(VENV)-adapters $(VENV)-vllm $(VENV)-sglang $(VENV)-docs $(VENV)-axe $(VENV)-torch-* site build dist

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,dev]'
	touch $@

# verl, TRL and AReaL for tests/peers, apart from ours: their pins differ.
$(VENV)-peers/ready: tests/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)-peers/bin/pip install --quiet --no-deps -r tests/peers/requirements.txt
	touch $@

# TRL alone, in folders for PYTHONPATH: all else is that of $(VENV). The oldest imports requests.
$(VENV)-trl/ready: constraints.txt $(VENV)/ready
	rm -rf $(VENV)-trl
	$(BIN)/pip install --quiet --no-deps -c constraints.txt --target $(VENV)-trl/oldest trl==1.0.0 requests charset-normalizer urllib3 certifi idna
	$(BIN)/pip install --quiet --no-deps -c constraints.txt --target $(VENV)-trl/newest trl==1.16.0
	touch $@

# Other frameworks, in folders for PYTHONPATH: without their dependencies, but for what the files that we use import.
$(VENV)-adapters/ready: tests/adapters/requirements.txt constraints.txt $(VENV)/ready
	rm -rf $(VENV)-adapters
	$(BIN)/pip install --quiet -c constraints.txt ray
	$(BIN)/pip install --quiet --no-deps --target $(VENV)-adapters/common -r tests/adapters/requirements.txt
	$(BIN)/pip install --quiet --no-deps --target $(VENV)-adapters/verl-oldest verl==0.8.0
	$(BIN)/pip install --quiet --no-deps --target $(VENV)-adapters/verl-newest verl==0.9.1
	$(BIN)/pip install --quiet --no-deps --target $(VENV)-adapters/others skyrl==0.3.0 skyrl-gym==0.4.0 areal==1.0.4
	-$(BIN)/pip install --quiet --no-deps --target $(VENV)-adapters/others openrlhf==0.11.2  # for Linux and Python 3.11 alone
	touch $@

# vLLM for the CPU, apart from ours: without CUDA, see the list.
$(VENV)-vllm/ready: tests/rollout/engines/vllm/requirements-cpu.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)-vllm/bin/pip install --quiet --no-deps -r tests/rollout/engines/vllm/requirements-cpu.txt
	$(VENV)-vllm/bin/pip install --quiet --no-deps setuptools -e .
	touch $@

# Another torch, with its own Triton; all else is that of the lock file.
$(VENV)-torch-$(TORCH)/ready: requirements-dev.lock
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==$(TORCH)
	grep -vE '^(torch|triton|nvidia-|cuda-)' requirements-dev.lock >$(@D)/requirements.txt
	$(@D)/bin/pip install --quiet --no-deps -r $(@D)/requirements.txt setuptools -e .
	touch $@

# SGLang, apart from ours: its torch and torchvision differ.
$(VENV)-sglang/ready: tests/rollout/engines/sglang/requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/pip install --quiet torch==2.14.1 torchvision==0.29.1
	$(VENV)-sglang/bin/pip install --quiet --no-deps -r $<
	touch $@

# What finds faults of accessibility, for tests of the report's page; without it they say that they were skipped.
$(VENV)-axe/ready:
	npm install --silent --no-save --prefix $(VENV)-axe axe-core@4.14.1
	touch $@

# MkDocs for `make docs`, apart from ours: it imports nothing of the package. Mermaid is the file of its npm package, which no page loads from elsewhere.
$(VENV)-docs/ready: docs/site/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --no-deps -r docs/site/requirements.txt
	cd $(VENV)-docs && npm pack --silent mermaid@11.17.2 && tar -xzf mermaid-11.17.2.tgz --strip-components=2 package/dist/mermaid.min.js
	rm $(VENV)-docs/mermaid-11.17.2.tgz
	echo "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8  $(VENV)-docs/mermaid.min.js" | sha256sum --check --quiet
	touch $@
