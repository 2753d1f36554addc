// qk: the scores of attend, written out.
#include "tiles_launch.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {
constexpr Kernel KERNELS[] = {
    kernel_of<Shape<2, 1, 4, 1, 64, 16, true>, SCORES>(),
    kernel_of<Shape<1, 4, 1, 1, 64, 16, true>, SCORES>(),
};
}  // namespace

extern const Kernels score_kernels = {KERNELS, 2};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
