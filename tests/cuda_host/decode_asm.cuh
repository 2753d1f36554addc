// The host twin of csrc/cuda/decode_asm.cuh. Addresses in shared memory are
// counted from its beginning.
#pragma once

#include "devices.h"
#include "launches.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

// m16n8k32: element (row, k) of A is in lane 4 (row % 8) + k % 16 / 4, register
// row / 8 + 2 (k / 16), byte k % 4; (k, n) of B in lane 4 n + k % 16 / 4,
// register k / 16; (row, n) of the result as of m16n8k16.
template <bool UNSIGNED>
inline void mma_int8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
  struct Operand {
    uint32_t a[4], b[2];
    const int *c;
    int result[4];
  } operand{{a0, a1, a2, a3}, {b0, b1}, c, {}};
  emulated::meet_warp("mma.m16n8k32", &operand, [] {
    int a[16][32], b[8][32];
    for (int lane = 0; lane < 32; lane++) {
      const Operand *x = (const Operand *)emulated::operand_of(lane);
      for (int i = 0; i < 4; i++) {
        for (int r = 0; r < 4; r++)
          a[lane / 4 + 8 * (r % 2)][lane % 4 * 4 + i + 16 * (r / 2)] = (int8_t)(x->a[r] >> 8 * i);
        for (int r = 0; r < 2; r++) {
          uint8_t byte = x->b[r] >> 8 * i;
          b[lane / 4][lane % 4 * 4 + i + 16 * r] = UNSIGNED ? byte : (int8_t)byte;
        }
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      Operand *x = (Operand *)emulated::operand_of(lane);
      for (int r = 0; r < 4; r++) {
        int sum = x->c[r];
        for (int k = 0; k < 32; k++) sum += a[lane / 4 + 8 * (r / 2)][k] * b[lane % 4 * 2 + r % 2][k];
        x->result[r] = sum;
      }
    }
  });
  for (int r = 0; r < 4; r++) d[r] = operand.result[r];
}

inline uint32_t transposed(uint32_t pair) {
  struct Operand {
    uint32_t pair, result;
  } operand{pair, 0};
  emulated::meet_warp("movmatrix", &operand, [] {
    auto of = [](int lane) { return (Operand *)emulated::operand_of(lane); };
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 2; i++) {
        int row = lane % 4 * 2 + i, column = lane / 4;
        of(lane)->result |= (of(4 * row + column / 2)->pair >> 16 * (column % 2) & 0xffff) << 16 * i;
      }
  });
  return operand.result;
}

inline uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) { return (x & mask) | (y & ~mask); }

inline void start_copy(void *to, const void *from, bool valid) {
  static const char zeros[16] __attribute__((aligned(16))) = {};
  copy_async<16>(to, valid ? from : zeros);
}
inline void start_copy(void *to, const void *from) { copy_async<16>(to, from); }
inline uint32_t shared_address(const void *p) { return (uint32_t)((const char *)p - emulated::block.shared); }
inline void start_copy(uint32_t to, const void *from) { copy_async<16>(emulated::block.shared + to, from); }

inline void start_copy_of_8(uint32_t to, const void *from) { copy_async<8>(emulated::block.shared + to, from); }

inline const char *advanced(const char *p, uint32_t x, uint32_t y) { return p + (uint64_t)x * y; }
inline void hold(int &) {}
inline void hold(uint32_t &) {}
inline int thread_again() { return (int)threadIdx.x; }
inline int3 block_again() { return {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z}; }
template <class Parameters>
void fetch_parameters(const Parameters &) {}

// A card so small that a head of a few hundred tokens is cut in parts, and one
// of a few thousand has many tiles a warp.
template <class Kernel>
int count_at_once(Kernel, int, int) {
  return 8;
}
// As many clusters as that card has room for; none of two, so that parts are combined by a second launch too.
template <class Kernel>
int count_clusters_at_once(Kernel, int size, int, int) {
  return size == 2 || !emulated::has_clusters() ? 0 : 8 / size;
}

template <int COUNT>
void sync_first() {
  emulated::meet_first(COUNT);
}
inline void arrive_in_cluster() { emulated::arrive_in_cluster(); }
inline void wait_for_cluster() { emulated::wait_for_cluster(); }
// The rank above 24 bits of the address.
inline uint32_t address_in_cluster(uint32_t address, int rank) { return address | (uint32_t)rank << 24; }
inline void store_in_cluster(uint32_t address, int x) {
  memcpy(emulated::in_cluster(address >> 24, address & 0xffffff, sizeof x), &x, sizeof x);
}
inline void open_for_bytes(uint32_t count, uint32_t bytes) {
  *(int64_t *)emulated::in_cluster(emulated::rank_in_cluster(), count, 8) = bytes;
}
template <int N>
void send_in_cluster(uint32_t to, const float (&x)[N], uint32_t count) {
  char *place = emulated::in_cluster(to >> 24, to & 0xffffff, sizeof x);
  if ((uintptr_t)place % sizeof x) emulated::fail("an address in the cluster is not aligned");
  if (to >> 24 != count >> 24) emulated::fail("bytes go to one block and are counted by another");
  memcpy(place, x, sizeof x);
  *(int64_t *)emulated::in_cluster(count >> 24, count & 0xffffff, 8) -= sizeof x;
}
inline void wait_for_bytes(uint32_t count) {
  while (*(int64_t *)emulated::in_cluster(emulated::rank_in_cluster(), count, 8)) emulated::let_others_run();
}
inline void tell_cluster_of_begin() { emulated::arrive_in_cluster(); }
template <int N>
void load_in_cluster(float (&to)[N], uint32_t address) {
  constexpr int ALIGNMENT = N % 4 == 0 ? 16 : 4 * N;
  const char *from = emulated::in_cluster(address >> 24, address & 0xffffff, sizeof to);
  if ((uintptr_t)from % ALIGNMENT) emulated::fail("an address in the cluster is not aligned");
  memcpy(to, from, sizeof to);
}

}  // namespace cuda
}  // namespace kvq
