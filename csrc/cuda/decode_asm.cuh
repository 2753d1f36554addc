// Instructions of the decode kernels that CUDA C++ has no name for, and what their launches need.
//   m16n8k32 int8   A: row g | g+8, k = 4c .. 4c+3 | 16+4c ..   B: column g, same k    C: row g | g+8, columns 2c, 2c+1
#pragma once

#include "devices.h"
#include "launches.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

// d = a . b + c of signed bytes; with UNSIGNED, b holds unsigned ones.
template <bool UNSIGNED>
__device__ __forceinline__ void mma_int8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1, const int (&c)[4]) {
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Of a matrix of 8 x 8 16-bit elements, of which lane 4 g + c has those of row g, columns 2 c and 2 c + 1: those of
// column g, rows 2 c and 2 c + 1.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// (x & mask) | (y & ~mask) in one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(x), "r"(y), "r"(mask));
  return r;
}

// Copies of 16 bytes from global to shared memory that do not wait; a lane waits for its own with wait_copy_groups,
// others' need __syncwarp after that.
__device__ __forceinline__ void start_copy(uint32_t to, const void *from) {  // an address in shared memory
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void start_copy_of_8(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void start_copy(void *to, const void *from) { start_copy(shared_address(to), from); }
__device__ __forceinline__ void start_copy(void *to, const void *from, bool valid) {  // zeros if not
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// p + x * y in one instruction.
__device__ __forceinline__ const char *advanced(const char *p, uint32_t x, uint32_t y) {
  const char *r;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(x), "r"(y), "l"(p));
  return r;
}

// Has an index computed by this point, as hold() of an address, and not a second time.
__device__ __forceinline__ void hold(int &index) { asm volatile("" : "+r"(index)); }
__device__ __forceinline__ void hold(uint32_t &index) { asm volatile("" : "+r"(index)); }

// threadIdx.x and blockIdx, read anew instead of kept in registers since they were last used.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ int3 block_again() {
  int3 x;
  asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z));
  return x;
}

// Brings the parameters of a launch, which are cold, one word of every 64 bytes.
template <class Parameters>
__device__ __forceinline__ void fetch_parameters(const Parameters &parameters) {
  const int *word = (const int *)&parameters;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Parameters) / 4; i += 16) asm volatile("" ::"r"(word[i]));
}

// CTAs of a kernel that run at the same time on the card; 0 where it has too little shared memory for one.
template <class Kernel>
int count_at_once(Kernel kernel, int threads, int bytes) {
  int device = 0, processors = 1, each = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();  // the answer, not an error of the launches to come
    return 0;
  }
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, bytes);
  return processors * each;
}

// Clusters of `size` CTAs, one above the other in y, that run at the same time; 0 before sm_90 and where they do not
// fit.
template <class Kernel>
int count_clusters_at_once(Kernel kernel, int size, int threads, int bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1, (unsigned)size), config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = (size_t)bytes;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 1, cluster.val.clusterDim.y = (unsigned)size, cluster.val.clusterDim.z = 1;
  config.attrs = &cluster, config.numAttrs = 1;
  int count = 0;
  constexpr int PORTABLE = 8;
  if ((size > PORTABLE &&
       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // the answer, not an error of the launches to come
    return 0;
  }
  return count;
}

// A barrier of the first COUNT threads of the CTA, whole warps.
template <int COUNT>
__device__ __forceinline__ void sync_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// A barrier of the cluster in two halves, each of whole warps. What a thread did before it arrived is seen by all that
// have waited. A launch without clusters is one of clusters of one CTA.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Says that the CTA has begun, and what open_for_bytes did, no more.
__device__ __forceinline__ void tell_cluster_of_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// What lies at an address in shared memory, in that of CTA `rank` of the cluster; before sm_90 the only one.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t address, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
#else
  return address;
#endif
}
#if __CUDA_ARCH__ >= 900
#define KVQ_LOAD_SHARED "ld.shared::cluster"
#else
#define KVQ_LOAD_SHARED "ld.shared"
#endif
// N floats, at a multiple of their size or of 16 bytes. Not moved across a barrier.
template <int N>
__device__ __forceinline__ void load_in_cluster(float (&to)[N], uint32_t address) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile(KVQ_LOAD_SHARED ".v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
                   : "r"(address + 4 * i)
                   : "memory");
  } else if constexpr (N == 2) {
    asm volatile(KVQ_LOAD_SHARED ".v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(address) : "memory");
  } else {
    static_assert(N == 1, "one float, two or a multiple of four");
    asm volatile(KVQ_LOAD_SHARED ".f32 %0, [%1];" : "=f"(to[0]) : "r"(address) : "memory");
  }
}
#undef KVQ_LOAD_SHARED

// A word to an address in the cluster, seen behind the next barrier.
__device__ __forceinline__ void store_in_cluster(uint32_t address, int x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#else
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#endif
}

// A place in shared memory that counts bytes which arrive. `count` is 8 bytes; one thread opens it.
__device__ __forceinline__ void open_for_bytes(uint32_t count, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(count), "r"(bytes) : "memory");
#endif
}
// Two floats or four to an address in the shared memory of a CTA of the cluster, which counts them when they are there.
template <int N>
__device__ __forceinline__ void send_in_cluster(uint32_t to, const float (&x)[N], uint32_t count) {
  static_assert(N == 2 || N == 4, "two floats or four");
#if __CUDA_ARCH__ >= 900
  if constexpr (N == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(count)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(x[0]), "f"(x[1]), "r"(count)
                 : "memory");
#endif
}
// Waits until all bytes have arrived that it was opened for.
__device__ __forceinline__ void wait_for_bytes(uint32_t count) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(count)
        : "memory");
  } while (!done);
#endif
}

}  // namespace cuda
}  // namespace kvq
