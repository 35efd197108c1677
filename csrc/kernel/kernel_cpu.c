/* The list of CPU kernels, and the choice among them. */
#include "kernel/kernel_cpu.h"

#include <string.h>
#ifdef CP_HAVE_X86
#include <cpuid.h>
#endif

#include "base/text.h"

/* Ascending. Index 0 is available everywhere. */
static const struct cp_kernel_ops *const kernels[] = {
    &cp_kernel_generic_ops,
#ifdef CP_HAVE_X86
    &cp_kernel_avx2_ops,
    &cp_kernel_avx512bf16_ops, /* below "avx512", which leaves bfloat16 to it where it is the faster one */
    &cp_kernel_avx512_ops,
#endif
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

#ifdef CP_HAVE_X86
/* Clang 14's builtin does not know the name. Asked once, when the library is loaded, as the builtins do it: CPUID traps
 * in a virtual machine, and would cost every call some 10 us. */
static bool has_f16c;

__attribute__((constructor)) static void ask_for_f16c(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0;
    has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (unsigned)bit_F16C) != 0;
}

/* These builtins look at what the system saves (XCR0) as well as at what the CPU has. F16C uses the registers of
 * AVX. */
bool cp_kernel_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
}

bool cp_kernel_cpu_has_avx512(void)
{
    return cp_kernel_cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

bool cp_kernel_cpu_has_avx512bf16(void)
{
    return cp_kernel_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

const struct cp_kernel_ops *cp_kernel_cpu_at(int isa)
{
    return isa >= 0 && isa < KERNELS ? kernels[isa] : NULL;
}

int cp_kernel_cpu_best(void)
{
    int isa = KERNELS - 1;
    while (isa > 0 && !kernels[isa]->is_available()) {
        isa--;
    }
    return isa;
}

const char *cp_kernel_cpu_name(int isa)
{
    const struct cp_kernel_ops *ops = cp_kernel_cpu_at(isa);
    return ops != NULL ? ops->name : "unknown";
}

enum cp_code cp_kernel_cpu_parse(const char *text, int *isa)
{
    if (text == NULL || text[0] == '\0') {
        *isa = cp_kernel_cpu_best();
        return CP_OK;
    }
    char allowed[128] = "";
    for (int i = 0; i < KERNELS; i++) {
        if (!kernels[i]->is_available()) {
            continue;
        }
        if (strcmp(text, kernels[i]->name) == 0) {
            *isa = i;
            return CP_OK;
        }
        cp_text_append(allowed, sizeof allowed, "%s%s", allowed[0] != '\0' ? ", " : "",
                       kernels[i]->name);
    }
    return cp_fail(CP_ERR_VALUE, "CP_ATTN_ISA is \"%.40s\"; this machine allows: %s",
                   text, allowed);
}

static enum cp_code check_backend(enum cp_backend backend)
{
    char names[CP_STATUS_TEXT / 2];
    return cp_backend_is_on_host(backend)
               ? CP_OK
               : cp_fail(CP_ERR_VALUE,
                         "backend '%s' cannot run on cpu; compatible ones are %s",
                         cp_backend_name(backend),
                         cp_backend_print(true, names, sizeof names));
}

enum cp_code cp_kernel_cpu_select(int isa_limit, enum cp_backend backend,
                                  enum cp_dtype dtype, int64_t head_dim,
                                  int64_t value_dim, const struct cp_kernel_ops **out,
                                  struct cp_format *format)
{
    CP_TRY(check_backend(backend));
    for (int isa = isa_limit < KERNELS ? isa_limit : KERNELS - 1; isa > 0; isa--) {
        if (kernels[isa]->is_available() &&
            kernels[isa]->describe(dtype, head_dim, value_dim, format) == CP_OK) {
            *out = kernels[isa];
            return CP_OK;
        }
    }
    CP_TRY(kernels[0]->describe(dtype, head_dim, value_dim, format));
    *out = kernels[0];
    return CP_OK;
}
