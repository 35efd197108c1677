/* Compares the declarations of torch_abi.h with torch's headers, which are C++ and come
 * with every torch (tests/simgpu/py/test_torch.py compiles this, and links nothing). */
#define USE_CUDA 1 /* declare CUDA's part too */
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <type_traits>

#include "torch_abi.h"

/* The arguments of our table make exactly torch's functions. */
#define SAME_CALL(field, name, arguments)                                              \
    static_assert(std::is_same_v<decltype(&name), AOTITorchError(*) arguments>, #name);
#define SAME_NUMBER(field, name, arguments)                                            \
    static_assert(std::is_same_v<decltype(&name), int32_t(*) arguments>, #name);
CP_TORCH_CALLS(SAME_CALL)
CP_TORCH_NUMBERS(SAME_NUMBER)
CP_TORCH_CUDA_CALLS(SAME_CALL)
