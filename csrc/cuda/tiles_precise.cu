// attend for float32.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS_128[] = {
    kernel_of<Shape<1, 1, 4, 1, 64, 128, true>, ATTEND>(),
    kernel_of<Shape<1, 4, 1, 1, 64, 128, true>, ATTEND>(),
};
constexpr Kernel KERNELS_512[] = {
    kernel_of<Shape<1, 2, 2, 2, 32, 512, true>, ATTEND>(),
    kernel_of<Shape<1, 4, 1, 2, 32, 512, true>, ATTEND>(),
};
}  // namespace

extern const Kernels precise_kernels_128 = {KERNELS_128, 2}, precise_kernels_512 = {KERNELS_512, 2};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
