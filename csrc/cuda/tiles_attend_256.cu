// attend with up to 256 dims of values.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS[] = {
    kernel_of<Shape<1, 2, 4, 1, 64, 256>, ATTEND>(),
    kernel_of<Shape<1, 8, 1, 1, 64, 256>, ATTEND>(),
};
}  // namespace

extern const Kernels attend_kernels_256 = {KERNELS, 2};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
