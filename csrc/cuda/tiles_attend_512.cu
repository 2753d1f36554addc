// attend with up to 512 dims of values: tiles of 32 tokens, two warps share the dims of a row.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS[] = {
    kernel_of<Shape<1, 2, 2, 2, 32, 512>, ATTEND>(),
    kernel_of<Shape<1, 4, 1, 2, 32, 512>, ATTEND>(),
};
}  // namespace

extern const Kernels attend_kernels_512 = {KERNELS, 2};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
