# Every target sets up the environment by itself, once: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A job has a dozen processes, and compiling torch and transformers takes each ten seconds: what is imported once is kept
# as bytecode, also where the environment says otherwise. So the set-up compiles nothing that is never imported.
export PYTHONDONTWRITEBYTECODE :=
# Quiet twice: errors alone, no warnings.
PIP := $(BIN)/python -m pip --quiet --quiet
# The release of transformers after that of the lock file, in a folder of its own. What it depends on fits both.
NEWER := 5.24.0
NEWER_HASH := sha256:ff5ebedf9359f94bb63772b6380eba6e7104d010cbbb2cb82c788817ea7486f6
NEWER_AT := $(abspath $(VENV))/transformers-$(NEWER)
# The release of Triton that comes with PyTorch 2.11 for GPUs, whose interpreter needs none.
TRITON := 3.6.0
TRITON_AT := $(abspath $(VENV))/triton-$(TRITON)

.PHONY: install demo demo-offline demo-hybrid demo-images serve cluster-demo test test-slow test-all test-threads test-newer test-triton lint format benchmark chaos clean

install: $(INSTALLED) ## Set up the environment.

demo: $(INSTALLED) ## Answer questions with SmolLM2-135M-Instruct, by plain decoding and with speculation; compare both.
	@echo "SmolLM2-135M-Instruct answers questions twice, by plain decoding and with speculation: a minute or so"
	@$(BIN)/python -m examples.demo

demo-offline: $(INSTALLED) ## The same with the embedded model, on GSM8K questions.
	@echo "The embedded model answers questions twice, by plain decoding and with speculation: a minute or so"
	@$(BIN)/python -m examples.demo --offline

demo-hybrid: $(INSTALLED) ## The same with the embedded hybrid of linear and softmax attention.
	@echo "The embedded hybrid answers questions twice, by plain decoding and with speculation: a minute or so"
	@$(BIN)/python -m examples.demo --hybrid

demo-images: $(INSTALLED) ## Ask a small model about a folder of images, by plain decoding and with speculation.
	@echo "A small model reads sheets of handwritten digits twice, by plain decoding and with speculation: a minute or so"
	@$(BIN)/python -m examples.demo_images

serve: $(INSTALLED) ## Serve the embedded model by OpenAI's API at http://127.0.0.1:8000, with a page to try it.
	$(BIN)/drafter serve --plain true

cluster-demo: $(INSTALLED) ## Start a cluster of several nodes on this machine, submit a job, see it grow and shrink.
	$(BIN)/python -m examples.cluster_demo

# Three processes on two cores: those tests that share a Ray cluster are one group, which runs in one of them and often
# waits. tests/conftest.py says what belongs together and what comes first.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --max-worker-restart 0 --dist loadgroup --no-loadscope-reorder

# Files of tests whose subject has threads, without those of jobs.
THREADS := $(addprefix tests/drafter/,drafters/test_text_queue.py engine/test_loop.py engine/test_parking.py test_llm.py test_threads.py) \
    $(addprefix tests/pipeline/,cluster/test_cluster_watch.py engines/test_feeder.py engines/test_model_cache.py \
    engines/test_watchdog.py io/test_fetching.py io/test_files.py learning/test_learning_feed.py output/test_lease.py) \
    tests/methods/learning

test: $(INSTALLED) ## Run the tests of every behaviour's main path: a few minutes.
	$(PYTEST) -m "not slow"

test-slow: $(INSTALLED) ## Run the other tests, and properties on more examples: killed processes, clusters, all model families.
	$(PYTEST) --hypothesis-profile whole -m "slow or hypothesis"

test-all: $(INSTALLED) ## Run all tests at once: what several share is started once.
	$(PYTEST) --hypothesis-profile whole

# One process, so that the pauses of one test's threads do not meet the work of another test.
test-threads: $(INSTALLED) ## Run the tests of threads while these change at each lock, in an order of files by SEED.
	$(BIN)/python -m pytest -p tests.support.jitter --jitter $(or $(SEED),$(shell date +%s)) -m "not slow" $(THREADS)

test-newer: $(INSTALLED) $(NEWER_AT) ## Compare the tokens of each kind of model with those of a newer transformers.
	@PYTHONPATH=$(NEWER_AT) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "$(NEWER)"'
	PYTHONPATH=$(NEWER_AT) $(PYTEST) -m "not slow" -k "generate or mixers or images" tests/drafter/test_identity.py \
	    $(addprefix tests/drafter/target_model/test_,hybrids.py mixers.py images.py)

test-triton: $(INSTALLED) $(TRITON_AT) ## Compare the kernels of a choice, in Triton's interpreter, with PyTorch's way; compile them.
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_AT) $(BIN)/python -m pytest tests/drafter/acceptance/test_triton_choice.py

lint: $(INSTALLED) ## Style, formatting, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Sort imports and format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(INSTALLED) ## Measure β and speed of the embedded heads; tables go to build/.
	$(BIN)/python -m benchmarks.heads drafter/embedded/heads --output build/embedded-heads
	$(BIN)/drafter evaluate --config benchmarks/evaluation.yaml --output build/evaluation

chaos: $(INSTALLED) ## Kill the processes of a generation job again and again; measure what Ray and a resume cost.
	$(BIN)/python -m benchmarks.generation_jobs.chaos --output benchmarks/results/chaos.json
	$(BIN)/python -m benchmarks.generation_jobs.overhead --output benchmarks/results/overhead.json
	$(BIN)/python -m benchmarks.generation_jobs.resume --output benchmarks/results/resume.json

$(NEWER_AT): | $(INSTALLED)
	@echo 'transformers==$(NEWER) --hash=$(NEWER_HASH)' | $(PIP) install --no-compile --no-deps --target $@ --requirement /dev/stdin

$(TRITON_AT): | $(INSTALLED)
	@$(PIP) install --no-compile --no-deps --target $@ triton==$(TRITON)

clean: ## Remove the environment and what the tools cache.
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: give one as make PYTHON=python3.11")'
	@echo "Setting up $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@# No build isolation, so that the build tool is locked like everything else.
	@echo "  torch"
	@$(PIP) install --no-compile -c constraints.txt setuptools torch
	@command -v c++ >/dev/null || echo "No C++ compiler: models that run on this CPU will be slower"
	@echo "  Ray, transformers and the others, and beside them the native library"
	@# DeepSpeed's set-up, too, imports torch.
	@$(BIN)/python -W ignore -m drafter.native.build & \
	    $(PIP) install --no-compile -c constraints.txt --no-build-isolation --editable '.[dev,train]' && wait
	@# The model of the demonstration, so that nothing is downloaded later. Its two settings keep bars and a warning away.
	@TQDM_DISABLE=1 DS_ACCELERATOR=cpu $(BIN)/python -m recipes.smollm2 fetch
	@touch $@
