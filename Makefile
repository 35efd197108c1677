# `make help` lists the targets. PYTHON is the interpreter that .venv is made from (3.10 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where torch is looked for besides pip's default index, whose wheel may bring CUDA; the CPU index
# is named on PyTorch's install page.
TORCH_INDEX ?=

PYTHON_SOURCES := setup.py cp_attn tests benchmarks examples dev
C_FILES = $(shell find benchmarks csrc cuda tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help venv demo train test check simgpu gpu cuda soak fuzz valgrind lint format bench ctest clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     sample digits on 2 and on 3 CPU ranks; writes digits.png"
	@echo "make train    train the digit model for 50 steps on 2 and on 3 CPU ranks; compare with one process"
	@echo "make test     C tests, the GPU path on a simulated GPU, the inputs that fuzzing keeps, Python tests"
	@echo "make check    C tests and the simulated GPU under AddressSanitizer, UBSan and ThreadSanitizer; fuzzing, shortly"
	@echo "make simgpu   the GPU path on a simulated GPU; MODE=asan, MODE=tsan, TESTS=test_scenes"
	@echo "make gpu      the suite for machines with GPUs, on as many ranks as there are"
	@echo "make cuda     compile cuda/ with nvcc for all architectures, and NCCL's header check"
	@echo "make soak     hurt ranks at random points for two minutes; SECONDS_OF_SOAK=3600 for an hour"
	@echo "make fuzz     libFuzzer on DLPack descriptions, schedules and messages; SECONDS=60 for each"
	@echo "make valgrind calls of all kinds under valgrind: memory errors and leaks of the extension"
	@echo "make lint     ruff, clang-format, the layers, one test for each source"
	@echo "make format   rewrite C and Python in the project's format"
	@echo "make bench    kernel speed on this machine"
	@echo "make ctest    C tests alone; see tests/c/Makefile for MODE, TESTS, ARGS, CC"
	@echo "make venv     .venv with the pinned tools and cp_attn; TORCH_INDEX=URL adds a wheel index"
	@echo "make clean    remove what was built; .venv stays"

venv: $(VENV)/installed

$(VENV)/requirements: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "cp_attn needs Python 3.10 or later; choose one with PYTHON=..."; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version); this downloads a few hundred MB once"
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module; on Debian and Ubuntu: apt-get install python3-venv python3-dev"; exit 1; }
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

# Editable, so that whatever runs from this folder finds the built module: Python files are live, C
# files are built anew when one of them changes.
$(VENV)/installed: $(VENV)/requirements pyproject.toml setup.py $(shell find csrc cuda -name '*.[ch]' -o -name '*.cu*')
	@echo "compiling cp_attn (a minute, three where there is nvcc; the log is build/install.log)"
	@mkdir -p build
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -v -e . \
		> build/install.log 2>&1 || { cat build/install.log; exit 1; }
	@touch $@

ctest: $(VENV)/requirements
	@$(MAKE) --no-print-directory -j2 -C tests/c all
	@$(MAKE) --no-print-directory -C tests/c run

simgpu: venv
	@$(MAKE) --no-print-directory -j2 -C tests/simgpu all
	@$(MAKE) --no-print-directory -C tests/simgpu run
	@$(BIN)/pytest tests/simgpu

gpu: venv
	@$(BIN)/pytest tests/gpu

cuda: $(VENV)/requirements
	@$(MAKE) --no-print-directory -j2 -C cuda all

test: venv ctest simgpu
	@$(MAKE) --no-print-directory -j2 -C tests/fuzz replay
	@CP_ATTN_REQUIRE=torch,diffusers,accelerate,peft,sklearn,safetensors,tqdm,jax $(BIN)/pytest tests/py
	@$(BIN)/pytest tests/gpu

SECONDS_OF_CHECK ?= 20
check: $(VENV)/requirements
	@echo "C tests and simulated GPU under AddressSanitizer and UBSan"
	@$(MAKE) --no-print-directory -j2 -C tests/c MODE=asan all
	@$(MAKE) --no-print-directory -C tests/c MODE=asan run
	@$(MAKE) --no-print-directory -j2 -C tests/simgpu MODE=asan all
	@$(MAKE) --no-print-directory -C tests/simgpu MODE=asan run
	@echo "C tests and simulated GPU under ThreadSanitizer"
	@$(MAKE) --no-print-directory -j2 -C tests/c MODE=tsan all
	@$(MAKE) --no-print-directory -C tests/c MODE=tsan run
	@$(MAKE) --no-print-directory -j2 -C tests/simgpu MODE=tsan all
	@$(MAKE) --no-print-directory -C tests/simgpu MODE=tsan run
	@echo "Fuzzing, each target for $(SECONDS_OF_CHECK) s"
	@$(MAKE) --no-print-directory -j2 -C tests/fuzz fuzz SECONDS=$(SECONDS_OF_CHECK)

lint: $(VENV)/requirements
	@$(BIN)/ruff check $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@$(BIN)/python dev/check_layers.py
	@$(BIN)/python dev/check_mirror.py

format: $(VENV)/requirements
	@$(BIN)/ruff check --fix-only $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/ruff format $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/clang-format -i $(C_FILES)

TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone
demo: venv
	@echo "two ranks, ring attention"
	@$(TORCHRUN) --nproc-per-node 2 examples/digits/sample.py --ring-degree 2
	@echo "three ranks, uneven ring attention"
	@$(TORCHRUN) --nproc-per-node 3 examples/digits/sample.py --ring-degree 3 --ring-anything

TRAIN := examples/digits/train.py --steps 50 --compare
train: venv
	@$(TORCHRUN) --nproc-per-node 2 $(TRAIN) --ring-degree 2 --ring-anything
	@$(TORCHRUN) --nproc-per-node 3 $(TRAIN) --ulysses-degree 3 --ulysses-anything

SECONDS_OF_SOAK ?= 120
soak: venv
	@$(BIN)/python tests/soak --seconds $(SECONDS_OF_SOAK)

fuzz: $(VENV)/requirements
	@$(MAKE) --no-print-directory -j2 -C tests/fuzz fuzz

valgrind: venv
	@$(BIN)/python tests/valgrind

bench: venv
	@$(BIN)/python -m benchmarks.kernels

clean:
	rm -rf build dist *.egg-info cp_attn/_C*.so digits.png
	rm -f $(VENV)/installed
