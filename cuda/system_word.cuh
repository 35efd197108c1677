/* Words that GPUs and hosts share: loads and stores that order the memory around them for
 * the whole system. */
#ifndef CP_CUDA_SYSTEM_WORD_CUH
#define CP_CUDA_SYSTEM_WORD_CUH

#include <cstdint>

/* acquire */
__device__ inline uint64_t cp_load_system(const uint64_t *word)
{
#ifdef __CUDACC__
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

/* release: what this thread has seen happen before, in kernels before it too, is seen by
 * whoever loads the value */
__device__ inline void cp_store_system(uint64_t *word, uint64_t value)
{
#ifdef __CUDACC__
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/* One more than this device has counted there so far. No order. */
__device__ inline uint64_t cp_count_up(uint64_t *word)
{
    static_assert(sizeof(unsigned long long) == sizeof *word, "an atomic of 64 bits");
    return atomicAdd((unsigned long long *)word, 1ULL) + 1;
}

#endif
