// pv: the sums of attend, with weights that are given.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS_128[] = {
    kernel_of<Shape<2, 1, 4, 1, 64, 128, true>, SUMS>(),
    kernel_of<Shape<1, 4, 1, 1, 64, 128, true>, SUMS>(),
};
constexpr Kernel KERNELS_512[] = {
    kernel_of<Shape<1, 2, 2, 2, 32, 512, true>, SUMS>(),
    kernel_of<Shape<1, 4, 1, 2, 32, 512, true>, SUMS>(),
};
}  // namespace

extern const Kernels sum_kernels_128 = {KERNELS_128, 2}, sum_kernels_512 = {KERNELS_512, 2};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
