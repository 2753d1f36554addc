// How the op files run the kernels of the instruction set in use on torch's threads.
#pragma once

#include "checks.h"
#include "kernels.h"

namespace kvq {

// Grow-only memory of a thread, aligned to 64 bytes: `call` for what all workers of a call share, `worker` for one
// worker.
char *call_scratch(int64_t bytes);
char *worker_scratch(int64_t bytes);

// Runs run(i, scratch of the worker) for i = 0 .. count on torch's threads.
template <class Run>
void run_parallel(int64_t count, int64_t scratch, const Run &run) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
    char *memory = worker_scratch(scratch);
    for (int64_t i = from; i < to; i++) run(i, memory);
  });
}

// isa.cpp: the kernels in use. Only attend asks by the dtype of its query; all other work is done in float32.
const Kernels &kernels(Dtype query = FLOAT32);

// plan.cpp: the phases of attend, qk and pv: prepare (with queries), the tasks, finish (unless the tasks write the
// output themselves).
void run_phases(const Kernels &k, const Attention &a, bool prepare, void (*task)(const Attention &, int64_t, char *),
                bool finish);

}  // namespace kvq
