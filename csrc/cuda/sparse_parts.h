// The parts of attend_selected that have files of their own.
#pragma once

#include "sparse_work.cuh"

namespace kvq {
namespace cuda {

// Packed keys and values of three bits and 128 dims: whether there is a kernel, how many of its blocks of threads a
// multiprocessor holds for so many rows a selection, its launch.
bool packed_fits(const Selected &);
int packed_ctas(int rows);
void launch_attend_packed(const Selected &, const Work &, cudaStream_t);

// Joins the parts of every row, and the first of `pieces` if they are given; false, and nothing done, unless outputs
// are 16-bit floats of a usual head dim.
bool launch_join(const Selected &, const Pieces *pieces, const Work &, cudaStream_t);

}  // namespace cuda
}  // namespace kvq
