// Launch of the decode kernels of one pair of head dims; a .cu file each compiles them. Splits fill the card once: all
// packed parts run at the same time.
#pragma once

#include <array>

#include "decode_attend.h"
#include "decode_small.cuh"

namespace kvq {
namespace cuda {

constexpr int EXACT_PARTS = 16;      // at most, where they have CTAs of their own
constexpr int SHORT_TILES = WARPS;   // at most, of a CTA whose warps work on them together
constexpr int FEW_TILES = 2;         // with room for no more, more such CTAs run at the same time
constexpr int SMALL_HEADS = 32;      // at most, that small_kernel was faster for
constexpr int MAX_WARP_TILES = 512;  // so that sums of lower bytes stay within 32 bits
constexpr int64_t MAX_PART_BYTES =
    64LL << 30;  // of all sums in scratch: combine_kernel has 32 bits to find four of them

template <class T, class S>
struct DecodeLaunch {
  using Small = SmallShape<S>;
  // CTAs of the card that run at the same time.
  static int blocks_at_once() {
    return once_a_device([] { return count_at_once(decode_kernel<T, S>, 32 * S::LONG_WARPS, S::SIZE); });
  }
  template <int TILES>
  static int short_blocks_at_once() {
    return once_a_device([] { return count_at_once(short_kernel<T, S>, THREADS, S::short_size(TILES)); });
  }

  // How many clusters of n CTAs run at the same time, in place n.
  template <class Kernel>
  static std::array<int, MAX_CLUSTER + 1> count_clusters(Kernel kernel, int threads, int bytes) {
    std::array<int, MAX_CLUSTER + 1> counts{0, count_at_once(kernel, threads, bytes)};
    for (int n = 2; n <= MAX_CLUSTER; n++) counts[n] = count_clusters_at_once(kernel, n, threads, bytes);
    return counts;
  }

  // Whether the parts of each of so many heads are made by a cluster of the long kernel, all of them at the same time.
  static bool fit_clusters(int64_t parts, int64_t heads) {
    if (S::EXACT_APART || parts > MAX_CLUSTER) return false;
    auto at_once = once_a_device([] { return count_clusters(decode_kernel<T, S>, 32 * S::LONG_WARPS, S::SIZE); });
    return parts == 1 || heads <= at_once[parts];
  }

  // Short contexts of few heads: a cluster each, two tiles a CTA and two steps of exact tokens a warp at most.
  static bool cut_small(const Attention &a, Parts &parts) {
    if constexpr (Small::EXISTS) {
      int at_once = once_a_device(
          [] { return count_clusters_at_once(small_kernel<T, S>, Small::CTAS, Small::NUM_THREADS, Small::SIZE); });
      int64_t heads = a.batch * a.heads * ceil_div(a.rows, S::NUM_ROWS);
      if (heads > (at_once < SMALL_HEADS ? at_once : SMALL_HEADS)) return false;
      if (parts.num_tiles < 1 || parts.num_tiles > Small::TEAMS * Small::CTAS) return false;
      if (parts.exact_steps > 2 * Small::SHARES) return false;
      parts.packed = Small::CTAS, parts.small = parts.clustered = true;
      parts.exact = parts.exact_steps < Small::SHARES ? parts.exact_steps : Small::SHARES;
      return true;
    }
    return false;
  }

  // Short contexts: up to TILES tiles a CTA, the rest of the card for exact tokens. False if there would be more.
  template <int TILES>
  static bool cut_short(const Attention &a, Parts &parts) {
    if constexpr (!S::SHORT) return false;
    int64_t at_once = short_blocks_at_once<TILES>() / (a.batch * a.heads * ceil_div(a.rows, S::NUM_ROWS));
    int64_t exact_ctas = ceil_div(parts.exact_steps, WARPS), packed_ctas = at_once - (exact_ctas > 0);
    if (parts.num_tiles < 1 || packed_ctas < 1) return false;
    int64_t tiles = ceil_div(parts.num_tiles, packed_ctas);
    if (tiles > TILES) return false;
    parts.packed = (int)ceil_div(parts.num_tiles, tiles);
    if (exact_ctas > at_once - parts.packed) exact_ctas = at_once - parts.packed;
    parts.exact = (int)(parts.exact_steps < WARPS * exact_ctas ? parts.exact_steps : WARPS * exact_ctas);
    parts.exact_shares = parts.exact;
    parts.room = TILES;
    return true;
  }

  static Parts parts_of(const Attention &a, void *scratch) {
    Parts parts{};
    int64_t heads = a.batch * a.heads, row_blocks = ceil_div(a.rows, S::NUM_ROWS);
    parts.first_tile = (int)(a.start / TILE_LEN);
    parts.num_tiles = (int)ceil_div(a.length, TILE_LEN) - parts.first_tile;
    parts.exact_steps = (int)ceil_div(a.exact_len, EXACT_STEP);
    if (cut_small(a, parts) || cut_short<FEW_TILES>(a, parts) || cut_short<SHORT_TILES>(a, parts))
      return place(a, scratch, parts);
    int64_t splits = blocks_at_once() / (heads * row_blocks), most = ceil_div(parts.exact_steps, WARPS);
    int64_t least = ceil_div(parts.num_tiles, WARPS * MAX_WARP_TILES);
    most = most > parts.num_tiles ? most : parts.num_tiles;  // a tile or four steps of exact tokens for each
    least = least > 1 ? least : 1;
    splits = splits > most ? most : splits;
    parts.packed = (int)(splits > least ? splits : least);
    // The fifth warp attends to them alone unless it would work longer than the others: a tile takes two steps' time.
    bool alone = S::FIFTH && parts.exact_steps <= 4 * parts.packed + 2 * parts.num_tiles / WARPS;
    int most_exact = S::EXACT_APART ? EXACT_PARTS : alone ? parts.packed : WARPS * parts.packed;
    parts.exact_shares = parts.exact_steps < most_exact ? parts.exact_steps : most_exact;
    parts.exact = S::EXACT_APART || parts.exact_shares < parts.packed ? parts.exact_shares : parts.packed;
    parts.clustered = fit_clusters(parts.packed, heads * row_blocks);
    return place(a, scratch, parts);
  }

  static Parts place(const Attention &a, void *scratch, Parts parts) {
    int64_t count = a.batch * a.heads * parts.count() * a.rows;
    parts.sums = (float *)scratch, parts.state = (float2 *)((char *)scratch + 4 * count * S::VDIM);
    return parts;
  }

  static int64_t scratch_bytes(const Attention &a) {
    Parts parts = parts_of(a, nullptr);
    return parts.clustered ? 0 : (4 * S::VDIM + 8) * a.batch * a.heads * a.rows * (int64_t)parts.count();
  }

  static bool fits(const Attention &a) { return blocks_at_once() > 0 && scratch_bytes(a) <= MAX_PART_BYTES; }

  static void launch(const Attention &a, void *scratch, cudaStream_t stream) {
    Parts parts = parts_of(a, scratch);
    int64_t apart = S::EXACT_APART || parts.room ? ceil_div(parts.exact, WARPS) : 0;
    dim3 grid((unsigned)(a.batch * a.heads), (unsigned)(parts.packed + apart), (unsigned)ceil_div(a.rows, S::NUM_ROWS));
    dim3 cluster(1, parts.clustered ? grid.y : 1);
    DecodeArgs args;
    to_args(a, args);
    auto start = [&](auto kernel, int threads, int bytes) {
      launch_clusters_behind(kernel, grid, cluster, threads, bytes, stream, args, parts);
    };
    if (parts.small) {
      if constexpr (Small::EXISTS) start(small_kernel<T, S>, Small::NUM_THREADS, Small::SIZE);
    } else if (!parts.room) {
      start(decode_kernel<T, S>, 32 * S::LONG_WARPS, S::SIZE);
    } else if constexpr (S::SHORT) {
      start(short_kernel<T, S>, THREADS, S::short_size(parts.room));
    }
    if (parts.clustered) return;
    int64_t rows = a.batch * a.heads * a.rows;
    auto combine = [&](auto kernel, int threads) {
      launch_behind(kernel, dim3((unsigned)rows), threads, threads / 8 * parts.count(), stream, args, parts);
    };
    if (rows >= MANY_ROWS)
      combine(combine_kernel<T, S::VDIM, 128>, 128);
    else if (parts.count() > MANY_PARTS)
      combine(combine_kernel<T, S::VDIM, 256, true>, 256);
    else
      combine(combine_kernel<T, S::VDIM, 256>, 256);
  }
};

template <class T, class S>
int64_t act(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  if (action == FITS) return DecodeLaunch<T, S>::fits(a);
  if (action == BYTES) return DecodeLaunch<T, S>::scratch_bytes(a);
  if (action == LAUNCH) DecodeLaunch<T, S>::launch(a, scratch, stream);
  return 1;
}

template <int KBITS, int VBITS, int DIM, int VDIM>
int64_t with_bits(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  bool few = a.rows <= 4, half = a.q.dtype == FLOAT16;
  using Few = DecodeShape<KBITS, VBITS, DIM, VDIM, false>;
  using Many = DecodeShape<KBITS, VBITS, DIM, VDIM, true>;
  if (half) return few ? act<__half, Few>(action, a, scratch, stream) : act<__half, Many>(action, a, scratch, stream);
  return few ? act<__nv_bfloat16, Few>(action, a, scratch, stream)
             : act<__nv_bfloat16, Many>(action, a, scratch, stream);
}

// Runs `action` with the kernel of the problem's bits, or returns 0 if there is none.
template <int DIM, int VDIM>
int64_t with_dims(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  switch (10 * a.keys.bits + a.values.bits) {
    case 33:
      return with_bits<3, 3, DIM, VDIM>(action, a, scratch, stream);
    case 44:
      return with_bits<4, 4, DIM, VDIM>(action, a, scratch, stream);
    case 22:
      return with_bits<2, 2, DIM, VDIM>(action, a, scratch, stream);
    case 43:
      if constexpr (DIM == VDIM && (DIM == 64 || DIM == 128))
        return with_bits<4, 3, DIM, VDIM>(action, a, scratch, stream);
      return 0;
    default:
      return 0;
  }
}

}  // namespace cuda
}  // namespace kvq
