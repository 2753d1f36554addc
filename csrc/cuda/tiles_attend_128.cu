// attend with up to 128 dims of values.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS[] = {
    kernel_of<Shape<2, 1, 4, 1, 64, 128>, ATTEND>(),
    kernel_of<Shape<2, 2, 2, 1, 64, 128>, ATTEND>(),
    kernel_of<Shape<2, 4, 1, 1, 64, 128>, ATTEND>(),
};
}  // namespace

extern const Kernels attend_kernels_128 = {KERNELS, 3};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
