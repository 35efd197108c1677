#include "sim_fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "sim.h"

enum { STACK_BYTES = 256 << 10, PAGE_BYTES = 4096, COLOURS = 61, COLOUR_BYTES = 192 };

/* There only where the program is built with the sanitizer. */
__attribute__((weak)) void *__tsan_get_current_fiber(void);
__attribute__((weak)) void *__tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void *fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void *fiber, unsigned flags);
__attribute__((weak)) void
__sanitizer_start_switch_fiber(void **save, const void *bottom, size_t bytes);
__attribute__((weak)) void
__sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *bytes);
enum { TSAN_NO_ORDER = 1 }; /* a switch alone orders nothing between two fibers */

struct sim_fiber {
    void (*body)(void *arg);
    void *arg;
    char *stack; /* a page that nobody may touch, then STACK_BYTES */
#ifdef __x86_64__
    void *own, *callers; /* stack pointers of who is not running */
#else
    ucontext_t own, callers;
#endif
    void *tsan_own, *tsan_caller, *asan_caller, *asan_own;
    const void *caller_bottom;
    size_t caller_bytes;
};

#ifdef __x86_64__
/* Saves what a call must keep, changes stacks, restores. swapcontext would make two
 * system calls for the signal mask, at each of a kernel's many barriers. */
void sim_fiber_switch(void **from, void *to);
__asm__(".text\n"
        ".globl sim_fiber_switch\n"
        ".hidden sim_fiber_switch\n"
        ".type sim_fiber_switch,@function\n"
        "sim_fiber_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size sim_fiber_switch,.-sim_fiber_switch\n");
#endif

static _Thread_local struct sim_fiber *starting; /* its first entry */

static void switch_in(struct sim_fiber *fiber)
{
#ifdef __x86_64__
    sim_fiber_switch(&fiber->callers, fiber->own);
#else
    (void)swapcontext(&fiber->callers, &fiber->own);
#endif
}

static void switch_out(struct sim_fiber *fiber)
{
#ifdef __x86_64__
    sim_fiber_switch(&fiber->own, fiber->callers);
#else
    (void)swapcontext(&fiber->own, &fiber->callers);
#endif
}

static void fiber_main(void)
{
    struct sim_fiber *fiber = starting;
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(NULL, &fiber->caller_bottom,
                                        &fiber->caller_bytes);
    }
    for (;;) {
        fiber->body(fiber->arg);
        sim_fiber_leave(fiber);
    }
}

struct sim_fiber *sim_fiber_create(void (*body)(void *arg), void *arg)
{
    struct sim_fiber *fiber = SIM_ROOM(struct sim_fiber);
    fiber->body = body;
    fiber->arg = arg;
    fiber->stack = mmap(NULL, STACK_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED || mprotect(fiber->stack, PAGE_BYTES, PROT_NONE)) {
        (void)fprintf(stderr, "simgpu: no memory for a fiber's stack\n");
        abort();
    }
#ifdef __x86_64__
    /* As if fiber_main had been called: its address where `ret` looks, below a return
     * address that is never used and keeps the stack's alignment. */
    static _Thread_local int count; /* stacks begin at different sets of the cache */
    count += 1;
    int colour = 64 + count % COLOURS * COLOUR_BYTES;
    void **top = (void **)(void *)(fiber->stack + PAGE_BYTES + STACK_BYTES - colour);
    top[-1] = NULL;
    *(void (**)(void))&top[-2] = fiber_main;
    fiber->own = &top[-8];
#else
    (void)getcontext(&fiber->own);
    fiber->own.uc_stack.ss_sp = fiber->stack + PAGE_BYTES;
    fiber->own.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber->own, fiber_main, 0);
#endif
    if (__tsan_create_fiber) {
        fiber->tsan_own = __tsan_create_fiber(0);
    }
    return fiber;
}

void sim_fiber_destroy(struct sim_fiber *fiber)
{
    if (__tsan_destroy_fiber) {
        __tsan_destroy_fiber(fiber->tsan_own);
    }
    sim_allow(fiber->stack, STACK_BYTES + PAGE_BYTES);
    (void)munmap(fiber->stack, STACK_BYTES + PAGE_BYTES);
    free(fiber);
}

void sim_fiber_enter(struct sim_fiber *fiber)
{
    starting = fiber;
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(&fiber->asan_caller, fiber->stack + PAGE_BYTES,
                                       STACK_BYTES);
    }
    if (__tsan_switch_to_fiber) {
        fiber->tsan_caller = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(fiber->tsan_own, TSAN_NO_ORDER);
    }
    switch_in(fiber);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(fiber->asan_caller, NULL, NULL);
    }
}

void sim_fiber_leave(struct sim_fiber *fiber)
{
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(&fiber->asan_own, fiber->caller_bottom,
                                       fiber->caller_bytes);
    }
    if (__tsan_switch_to_fiber) {
        __tsan_switch_to_fiber(fiber->tsan_caller, TSAN_NO_ORDER);
    }
    switch_out(fiber);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(fiber->asan_own, &fiber->caller_bottom,
                                        &fiber->caller_bytes);
    }
}
