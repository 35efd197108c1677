# What the C tests and those of the simulated GPU share: how a MODE compiles, and how programs run.
# The Makefile that includes this has set ROOT, and sets BUILD, TESTS and the rules of `all`.

.DEFAULT_GOAL := all
MODES := $(ROOT)/tests/modes.mk

MODE ?= plain
VENV_PYTHON ?= $(ROOT)/.venv/bin/python
ifeq ($(origin CC),default)
CC := gcc
endif

MODE_plain := -O2 -g
MODE_asan := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
MODE_tsan := -O1 -g -fno-omit-frame-pointer -fsanitize=thread -DTEST_UNDER_TSAN=1
# As setup.py compiles; benchmarks link its library.
MODE_release := -O3
ifeq ($(MODE_$(MODE)),)
$(error MODE is "$(MODE)"; allowed: plain, asan, tsan, release)
endif
# Seconds: what one test may take (test.h) and what one program may take.
DEADLINE_plain := 120
DEADLINE_asan := 300
DEADLINE_tsan := 300
DEADLINE_release := 120
LIMIT_plain := 600
LIMIT_asan := 1200
LIMIT_tsan := 1200
LIMIT_release := 300

# gcc 12's ThreadSanitizer cannot start where the kernel spreads mappings widely
# (vm.mmap_rnd_bits above 28); setarch -R turns that off for one program, where it is allowed to.
NO_ASLR := $(if $(filter tsan,$(MODE)),$(shell setarch -R true 2>/dev/null && echo setarch -R))

run: all
	@passed=0; failed=0; \
	export CP_TEST_DEADLINE=$${CP_TEST_DEADLINE:-$(DEADLINE_$(MODE))}; \
	export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=0; \
	for name in $(TESTS); do \
		log=$(BUILD)/$$name.log; start=$$(date +%s); \
		timeout -k 5 $(LIMIT_$(MODE)) $(NO_ASLR) $(BUILD)/$$name $(ARGS) > $$log 2>&1; code=$$?; \
		set -- $$(tail -n 1 $$log | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$$/\1 \2/p'); \
		p=$${1:-0}; f=$${2:-0}; \
		if [ $$code -ne 0 ] && [ $$f -eq 0 ]; then f=1; fi; \
		if [ $$code -eq 0 ] && [ $$# -ne 2 ]; then f=1; fi; \
		if [ $$f -ne 0 ]; then cat $$log; fi; \
		grep '^SKIPPED' $$log; \
		echo "  $(MODE) $$name: $$p passed, $$f failed (exit $$code, $$(($$(date +%s) - start)) s)"; \
		passed=$$((passed + p)); failed=$$((failed + f)); \
	done; \
	echo "$$passed passed, $$failed failed"; \
	[ $$failed -eq 0 ] && [ $$passed -gt 0 ]
