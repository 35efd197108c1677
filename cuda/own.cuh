/* Which product and width the own kernel takes a call with. */
#ifndef CP_CUDA_OWN_CUH
#define CP_CUDA_OWN_CUH

#include "by_fma.cuh"
#include "by_mma.cuh"

template <int WIDTH_> struct cp_tile_width {
    static constexpr int WIDTH = WIDTH_;
};

/* What `run(Product{}, cp_tile_width<WIDTH>{})` says, with the product of the dtype and the
 * least width that has both dims. */
template <class Run>
enum cp_code cp_with_tile(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                          const Run &run)
{
    int64_t dim = head_dim > value_dim ? head_dim : value_dim;
    auto with = [&](auto product) {
        return dim <= 64    ? run(product, cp_tile_width<64>{})
               : dim <= 128 ? run(product, cp_tile_width<128>{})
                            : run(product, cp_tile_width<256>{});
    };
    return dtype == CP_DTYPE_FLOAT32    ? with(cp_by_fma{})
           : dtype == CP_DTYPE_BFLOAT16 ? with(cp_by_mma<cp_bf16>{})
                                        : with(cp_by_mma<cp_f16>{});
}

#endif
