# What bench_gpu.c is built from beside cuda/: for cuda/Makefile, which builds it for a GPU, and
# tests/simgpu/Makefile, which builds it for the simulated one.
BENCH_SOURCES := $(wildcard $(ROOT)/csrc/base/*.c) \
	$(addprefix $(ROOT)/csrc/tensor/,dtype.c nest.c view.c) $(wildcard $(ROOT)/csrc/plan/*.c) \
	$(filter-out $(wildcard $(ROOT)/csrc/schedule/verify*.c),$(wildcard $(ROOT)/csrc/schedule/*.c)) \
	$(addprefix $(ROOT)/csrc/exec/,run.c run_order.c spread.c) \
	$(addprefix $(ROOT)/benchmarks/,bench_gpu.c comm_mirror.c)
