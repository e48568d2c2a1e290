// What the launches need of the machine, sm_90: asynchronous copies, matrix products, barriers within and across CTAs.
// A host build replaces this file by one that runs threads as fibers, so that the same code is tested without a GPU.
#pragma once

#include <cstdint>

#define ON_DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

namespace device {

// Clock cycles of a wait, some two seconds: by then a partner is lost, and a trap beats a machine that hangs.
constexpr long long PATIENCE = 4'000'000'000ll;

ON_DEVICE int thread_id() { return int(threadIdx.x); }
ON_DEVICE int block_id() { return int(blockIdx.x); }
ON_DEVICE long long ticks() { return clock64(); }
ON_DEVICE long long nanoseconds() {
    long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
ON_DEVICE uint32_t shared_at(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
ON_DEVICE void sync_all() { __syncthreads(); }
// The threads of a warp group, of 128.
ON_DEVICE void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
ON_DEVICE float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
ON_DEVICE float from_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Two floats as bf16, the first one in the low half.
ON_DEVICE uint32_t pack(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// The same as fp16, whose rounding is finer.
ON_DEVICE uint32_t pack_fine(float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
ON_DEVICE float2 unpack_fine(uint32_t both) {
    float2 x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(x.x), "=f"(x.y) : "r"(both));
    return x;
}
// The same as e4m3; what is too large becomes the largest.
ON_DEVICE uint16_t pack_coded(float low, float high) {
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
ON_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
ON_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
ON_DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
ON_DEVICE float inverse_root(float x) { return rsqrtf(x); }
ON_DEVICE float exponential(float x) { return __expf(x); }
ON_DEVICE float quotient(float a, float b) { return __fdividef(a, b); }

using Barrier = uint64_t;

ON_DEVICE void barrier_init(Barrier* b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(b)), "r"(arrivals) : "memory");
}
ON_DEVICE void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
ON_DEVICE void barrier_arrive_expecting(Barrier* b, uint32_t bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }" ::"r"(shared_at(b)), "r"(bytes) : "memory");
}
ON_DEVICE bool barrier_passed(Barrier* b, uint32_t parity) {
    uint32_t passed;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed) : "r"(shared_at(b)), "r"(parity) : "memory");
    return passed != 0;
}
ON_DEVICE void barrier_wait(Barrier* b, uint32_t parity) {
    if (barrier_passed(b, parity)) return;
    const long long begin = ticks();
    while (!barrier_passed(b, parity))
        if (ticks() - begin > PATIENCE) __trap();
}

// Start copying `bytes` from global to shared memory; the barrier counts them as they come.
ON_DEVICE void copy_row(void* to, const void* from, uint32_t bytes, Barrier* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_at(to)), "l"(from), "r"(bytes), "r"(shared_at(b)) : "memory");
}

// What a tensor of up to five axes is like, for copies of its tiles; made by the driver.
struct alignas(64) Map {
    uint64_t words[16];
};
struct Place {
    int at[5];
};

// Start copying a tile to shared memory, in rows of 128 bytes as products have them; zeros where the tensor ends.
ON_DEVICE void copy_tile(void* to, const Map& map, const Place& place, Barrier* b) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5,%6}], [%7];"
                 ::"r"(shared_at(to)), "l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]),
                 "r"(shared_at(b)) : "memory");
}

ON_DEVICE void ask_for_tile(const Map& map, const Place& place) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1,%2,%3,%4,%5}];"
                 ::"l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]) : "memory");
}

// A chain of launches: the next one may start while this one runs, and waits until this one is complete.
#ifdef STRETTO_LATE
ON_DEVICE void let_next_start() {}
ON_DEVICE void await_previous() { asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory"); }
#else
ON_DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
ON_DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif
ON_DEVICE void ask_for(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Copies of 16 bytes by threads; zeros where there is nothing to copy. They are awaited in the groups that they end in.
ON_DEVICE void fetch16(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
ON_DEVICE void end_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
ON_DEVICE void await_fetches() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

// CTAs of a cluster write to each other's shared memory.
ON_DEVICE int rank_in_cluster() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
// Hands nothing over but that this thread has come so far.
ON_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
ON_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
using Remote = uint32_t;
ON_DEVICE Remote at_rank(const void* p, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_at(p)), "r"(rank));
    return there;
}
// What is sent is counted by a barrier of the CTA that gets it.
ON_DEVICE void send4(Remote to, Remote barrier, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%2,%3,%4,%5}, [%1];"
                 ::"r"(to), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
ON_DEVICE void send4(Remote to, Remote barrier, float a, float b, float c, float d) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2,%3,%4,%5}, [%1];"
                 ::"r"(to), "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
ON_DEVICE void send2(Remote to, Remote barrier, float a, float b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2,%3}, [%1];"
                 ::"r"(to), "r"(barrier), "f"(a), "f"(b) : "memory");
}

// Products of a warp group, asynchronous. Factors in shared memory have rows of 128 bytes whose 16-byte pieces are swapped by
// the row's number in a group of eight; groups are 1024 bytes apart, and the first lies at a multiple of 1024.
ON_DEVICE uint64_t tile_at(const void* p) { return uint64_t(shared_at(p) >> 4) | 64ull << 16 | 64ull << 32 | 1ull << 62; }
// Between what threads wrote to shared memory and a product that reads it.
ON_DEVICE void before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
ON_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ON_DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the last LATER runs of products are done.
template <int LATER>
ON_DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory"); }
// c (+)= A B^T for rows of 16 columns: 64 rows of A, 56 of B. Lane (g, t) of warp w has c[4 n + i] of row 16 w + g + i / 2 * 8
// and of row 8 n + 2 t + i % 2 of B.
ON_DEVICE void multiply_56(float (&c)[28], const void* a, const void* b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %30, 0; wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27"
                 "}, %28, %29, p, 1, 1, 0, 0; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27])
                 : "l"(tile_at(a)), "l"(tile_at(b)), "r"(int(add)));
}
// The same of e4m3, for rows of 32 columns.
ON_DEVICE void multiply_56_coded(float (&c)[28], const void* a, const void* b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %30, 0; wgmma.mma_async.sync.aligned.m64n56k32.f32.e4m3.e4m3 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27"
                 "}, %28, %29, p, 1, 1; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27])
                 : "l"(tile_at(a)), "l"(tile_at(b)), "r"(int(add)));
}
// The same of bf16, for 64 rows of B.
ON_DEVICE void multiply_64(float (&c)[32], const void* a, const void* b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
                 : "l"(tile_at(a)), "l"(tile_at(b)), "r"(int(add)));
}
// c (+)= A B, where B has 16 rows of 64 columns.
ON_DEVICE void multiply_by_rows(float (&c)[32], const void* a, const void* b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, p, 1, 1, 0, 1; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
                 : "l"(tile_at(a)), "l"(tile_at(b)), "r"(int(add)));
}

}  // namespace device
