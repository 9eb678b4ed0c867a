# The same commands for people and for CI. Everything a target needs is set up by the target.
PYTHON ?= python3
VENV ?= .venv
CUTE ?= .venv-cute
BIN := $(VENV)/bin
SOURCES := clients service kernels tests docker

.PHONY: setup kernels demo test test-long check format bench image-check clean

setup: $(VENV)/.ready

# constraints.txt pins what CI runs; torch is the CPU build that satisfies it.
# nixl goes in without its dependencies: one of them is a second CUDA build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	touch $@

# The kernels' compiler has a venv of its own on top of $(VENV): what runs them does without it.
$(CUTE)/.ready: $(VENV)/.ready
	$(BIN)/python -m venv $(CUTE)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$($(CUTE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvfold.pth
	$(CUTE)/bin/python -m pip install --quiet 'nvidia-cutlass-dsl[cu13]==4.8.1'
	touch $@

kernels: $(CUTE)/.ready  ## the cute kernels, compiled ahead; nothing to do if they fit the sources
	$(CUTE)/bin/python -m kvfold_kernels.compress.cute_build

demo: setup  ## a worker process serves the compressors of a small DeepSeek-V4 model
	$(BIN)/kvfold demo

test: setup kernels  ## all tests that fit into a quarter of an hour
	$(BIN)/python -m pytest -m 'not long'

test-long: setup  ## fuzzing and stateful tests at length
	$(BIN)/python -m pytest -m long

check: setup  ## lint, format, types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: setup  ## kernels, plans, ingest and step latency on this machine
	$(BIN)/kvfold bench --json bench-kernels.json
	$(BIN)/python -m tests.bench --out bench.json

image-check: setup  ## build the images, run compose.yaml with them, compare; Docker, podman, or root on Debian
	$(BIN)/python docker/check

clean:
	rm -rf $(VENV) $(CUTE) kernels/kvfold_kernels/compress/cute/lib build dist .pytest_cache .ruff_cache .hypothesis
