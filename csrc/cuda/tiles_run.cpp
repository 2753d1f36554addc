#include "tiles_run.h"

#include <torch/csrc/stable/macros.h>

namespace kvq {
namespace cuda {
namespace tiles {

namespace {

int most_shared_bytes() {
  int device, bytes;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

void run_part(Plan &plan, const Kernel &kernel, Mode mode, char *memory, cudaStream_t stream) {
  place_scratch(plan, mode, memory);
  launch_prepare(plan, stream);
  launch_mask_kinds(plan, stream);
  kernel.launch(plan, stream);
  if (mode != SCORES) launch_finish(plan.a, stream);
}

}  // namespace

void run(Call &call, const Attention &a, Mode mode) {
  if (a.batch * a.heads * a.rows == 0) return;
  int multiprocessors = call.num_multiprocessors();
  int shared_bytes = most_shared_bytes();
  const Kernel &kernel = choose_kernel(a, mode, multiprocessors, shared_bytes);
  int64_t step = part_queries(a, kernel, mode, multiprocessors), last = a.queries % step ? a.queries % step : step;
  int64_t bytes = 0;
  for (int64_t count : {step, last}) {  // parts differ in length only
    Plan plan = make_plan(part_of(a, 0, count), kernel, mode, multiprocessors);
    int needed = kernel.shared_bytes(plan);
    STD_TORCH_CHECK(needed <= shared_bytes, "torch_kvq: head dims ", a.dim, " and ", a.value_dim, " need ", needed,
                    " bytes of shared memory, this GPU has ", shared_bytes);
    int64_t size = place_scratch(plan, mode, nullptr);
    bytes = size > bytes ? size : bytes;
  }
  char *memory = call.scratch(bytes);
  for (int64_t first = 0; first < a.queries; first += step) {
    int64_t count = a.queries - first < step ? a.queries - first : step;
    Plan plan = make_plan(part_of(a, first, count), kernel, mode, multiprocessors);
    run_part(plan, kernel, mode, memory, call.stream());
  }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
