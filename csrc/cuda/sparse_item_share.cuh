// sign_top_p_select in one launch: what the blocks of an item tell each other, by memory or, where they are a cluster,
// by reading each other's shared memory behind a barrier of the hardware, a third of the time.
#pragma once

#include "sparse_item.cuh"

namespace kvq {
namespace cuda {

// A barrier of the blocks of a cluster.
__device__ __forceinline__ void meet_cluster() { arrive_in_cluster(), wait_for_cluster(); }

// N words that lie in the shared memory of block `rank` of the cluster where `x` lies in this one's.
template <int N>
__device__ __forceinline__ void words_of(uint32_t (&to)[N], const void *x, int rank) {
  float words[N];
  load_in_cluster(words, address_in_cluster(shared_address(x), rank));
#pragma unroll
  for (int i = 0; i < N; i++) to[i] = __float_as_uint(words[i]);
}

template <class Use>
__device__ __forceinline__ void each_word(const uint32_t *x, int blocks, Use use) {
#pragma unroll 2
  for (int rank = 0; rank < blocks; rank++) {
    uint32_t word[1];
    words_of(word, x, rank);
    use(word[0]);
  }
}

// Rows that have large scores in any block of the cluster, as bits.
__device__ __forceinline__ uint32_t large_rows(const ItemMemory &m, int blocks) {
  int lane = lane_id(), r = lane % SCAN_ROWS;
  uint32_t large[1] = {};
  if (lane / SCAN_ROWS < blocks) words_of(large, &m.notes->large[r], lane / SCAN_ROWS);
  uint32_t bits = __ballot_sync(ALL_LANES, large[0]);
  for (int step = WARP / 2; step >= SCAN_ROWS; step /= 2) bits |= bits >> step;
  return bits & ((1 << SCAN_ROWS) - 1);
}
static_assert(MAX_ITEM_CLUSTER * SCAN_ROWS <= WARP, "a lane has a row of a block");

}  // namespace cuda
}  // namespace kvq
