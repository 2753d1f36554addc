// Launchers of the kernels of sparse attention. They enqueue and return; nothing waits. `scratch` holds as many bytes
// as the function of that name says, aligned to 256.
#pragma once

#include <cuda_runtime_api.h>

#include "sparse_structs.h"

namespace kvq {
namespace cuda {

void launch_quantise_query(const QueryCoding &, cudaStream_t);
void launch_index_keys(const Indexing &, cudaStream_t);
void launch_sign_scores(const SignScan &, int num_multiprocessors, cudaStream_t);
int64_t top_p_scratch_bytes(const TopP &, int num_multiprocessors);
void launch_top_p_select(const TopP &, int num_multiprocessors, void *scratch, cudaStream_t);
int64_t sign_top_p_scratch_bytes(const SignScan &, const TopP &, int num_multiprocessors);
void launch_sign_top_p_select(const SignScan &, const TopP &, int num_multiprocessors, void *scratch, cudaStream_t);
// All of attend_top_p_select in two launches, with the scratch of sign_top_p_select, for problems that fit.
bool attend_top_p_select_fits(const QueryCoding &, const Attention &, const SignScan &, const TopP &,
                              int num_multiprocessors);
void launch_attend_top_p_select(const QueryCoding &, const Attention &, const SignScan &, const TopP &,
                                int num_multiprocessors, void *scratch, cudaStream_t);
void launch_qk_selected(const Selected &, cudaStream_t);
int64_t attend_selected_scratch_bytes(const Selected &, int num_multiprocessors);
void launch_attend_selected(const Selected &, int num_multiprocessors, void *scratch, cudaStream_t);
// Merged with the first of two pieces. The second, of the selected tokens, is written if the merge is a launch of its
// own.
void launch_merge_selected(const Selected &, const Pieces &, int num_multiprocessors, void *scratch, cudaStream_t);
void launch_gather_selected(const Gathering &, int num_multiprocessors, cudaStream_t);

}  // namespace cuda
}  // namespace kvq
