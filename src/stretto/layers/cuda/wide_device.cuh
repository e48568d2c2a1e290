// What wide products need of the machine beyond device.cuh, sm_90: copies to several CTAs of a cluster, barriers across CTAs, products
// of many rows of B. A host build replaces this file too.
#pragma once

#include "device.cuh"

namespace device {

ON_DEVICE int cluster_id(int size) { return int(blockIdx.x) / size; }
ON_DEVICE int clusters(int size) { return int(gridDim.x) / size; }
ON_DEVICE void sync_warp() { __syncwarp(); }
// Of 384 threads, 128 that only copy leave registers to the others.
ON_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
ON_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
// The same for threads that copy with less and compute with more.
ON_DEVICE void give_most_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
ON_DEVICE void take_most_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
ON_DEVICE float at(const float* p) { return __ldg(p); }
ON_DEVICE int64_t at(const int64_t* p) { return __ldg(reinterpret_cast<const long long*>(p)); }
ON_DEVICE float4 at4(const float* p) { return __ldg(reinterpret_cast<const float4*>(p)); }

// Start copying a tile to the same place in those CTAs of the cluster that the mask names; the barrier of each counts what comes there.
ON_DEVICE void copy_tile_to_many(void* to, const Map& map, const Place& place, Barrier* b, uint32_t mask) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2,%3,%4,%5,%6}], [%7], %8;"
                 ::"r"(shared_at(to)), "l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]),
                 "r"(shared_at(b)), "h"(uint16_t(mask)) : "memory");
}
// Arrive at a barrier of a CTA of the cluster. What was read before by products is no matter of this thread's memory, so nothing
// is released to the cluster: that would be a fence of the whole device, some 900 cycles.
ON_DEVICE void barrier_arrive_at(Remote barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

ON_DEVICE uint32_t bits_from_lane(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
ON_DEVICE uint32_t bits_from_lane_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
ON_DEVICE void barrier_arrive(Barrier* b) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(shared_at(b)) : "memory");
}

ON_DEVICE void ask_for_map(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// All of so many threads, which are not all of the CTA's.
template <int THREADS>
ON_DEVICE void sync_some() { asm volatile("bar.sync 15, %0;" ::"n"(THREADS) : "memory"); }
// More bytes are to come before a phase ends that is not over yet.
ON_DEVICE void barrier_expect(Barrier* b, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_at(b)), "r"(bytes) : "memory");
}

// Write 16-bit numbers of a product's sums turned: a lane has two of a row, and gives the address of a column's eight. Of 8 columns,
// or of four times as many.
ON_DEVICE void store_turned(void* to, uint32_t a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_at(to)), "r"(a) : "memory");
}
ON_DEVICE void store_turned(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_at(to)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// gelu(x) * y with the tanh approximation, in the instructions of the kernels in Triton.
ON_DEVICE float gated(float x, float y) {
    float share;
    asm("{ ex2.approx.ftz.f32 %0, %1; add.ftz.f32 %0, %0, 0f3F800000; rcp.approx.ftz.f32 %0, %0; }"
        : "=&f"(share) : "f"(x * fmaf(x * -0.1029432397f, x, -2.302208198f)));
    return x * share * y;
}
// The same for e4m3, which hides the tanh of the chip.
ON_DEVICE float gated_for_codes(float x, float y) {
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x * fmaf(x * 0.0356774081f, x, 0.7978845608f)));
    const float half = 0.5f * x;
    return fmaf(half, tanh, half) * y;
}

// Sums of 8, 16, ... rows of B, four a lane for every 8, by number and as operands.
#define NUMBERS_8 "%0,%1,%2,%3"
#define SUMS_8 "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define NUMBERS_16 NUMBERS_8 "," "%4,%5,%6,%7"
#define SUMS_16 SUMS_8, "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
#define NUMBERS_24 NUMBERS_16 "," "%8,%9,%10,%11"
#define SUMS_24 SUMS_16, "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11])
#define NUMBERS_32 NUMBERS_24 "," "%12,%13,%14,%15"
#define SUMS_32 SUMS_24, "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
#define NUMBERS_40 NUMBERS_32 "," "%16,%17,%18,%19"
#define SUMS_40 SUMS_32, "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19])
#define NUMBERS_48 NUMBERS_40 "," "%20,%21,%22,%23"
#define SUMS_48 SUMS_40, "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23])
#define NUMBERS_56 NUMBERS_48 "," "%24,%25,%26,%27"
#define SUMS_56 SUMS_48, "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27])
#define NUMBERS_64 NUMBERS_56 "," "%28,%29,%30,%31"
#define SUMS_64 SUMS_56, "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define NUMBERS_72 NUMBERS_64 "," "%32,%33,%34,%35"
#define SUMS_72 SUMS_64, "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35])
#define NUMBERS_80 NUMBERS_72 "," "%36,%37,%38,%39"
#define SUMS_80 SUMS_72, "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39])
#define NUMBERS_88 NUMBERS_80 "," "%40,%41,%42,%43"
#define SUMS_88 SUMS_80, "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43])
#define NUMBERS_96 NUMBERS_88 "," "%44,%45,%46,%47"
#define SUMS_96 SUMS_88, "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
#define NUMBERS_104 NUMBERS_96 "," "%48,%49,%50,%51"
#define SUMS_104 SUMS_96, "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51])
#define NUMBERS_112 NUMBERS_104 "," "%52,%53,%54,%55"
#define SUMS_112 SUMS_104, "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55])
#define NUMBERS_120 NUMBERS_112 "," "%56,%57,%58,%59"
#define SUMS_120 SUMS_112, "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59])
#define NUMBERS_128 NUMBERS_120 "," "%60,%61,%62,%63"
#define SUMS_128 SUMS_120, "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define NUMBERS_136 NUMBERS_128 "," "%64,%65,%66,%67"
#define SUMS_136 SUMS_128, "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67])
#define NUMBERS_144 NUMBERS_136 "," "%68,%69,%70,%71"
#define SUMS_144 SUMS_136, "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71])
#define NUMBERS_152 NUMBERS_144 "," "%72,%73,%74,%75"
#define SUMS_152 SUMS_144, "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75])
#define NUMBERS_160 NUMBERS_152 "," "%76,%77,%78,%79"
#define SUMS_160 SUMS_152, "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79])
#define NUMBERS_168 NUMBERS_160 "," "%80,%81,%82,%83"
#define SUMS_168 SUMS_160, "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83])
#define NUMBERS_176 NUMBERS_168 "," "%84,%85,%86,%87"
#define SUMS_176 SUMS_168, "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87])
#define NUMBERS_184 NUMBERS_176 "," "%88,%89,%90,%91"
#define SUMS_184 SUMS_176, "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91])
#define NUMBERS_192 NUMBERS_184 "," "%92,%93,%94,%95"
#define SUMS_192 SUMS_184, "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])
#define NUMBERS_200 NUMBERS_192 "," "%96,%97,%98,%99"
#define SUMS_200 SUMS_192, "+f"(c[96]), "+f"(c[97]), "+f"(c[98]), "+f"(c[99])
#define NUMBERS_208 NUMBERS_200 "," "%100,%101,%102,%103"
#define SUMS_208 SUMS_200, "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103])

// c (+)= A B^T for 32 bytes of columns, 16 of bf16 or 32 of e4m3: 64 rows of A, N of B. Lane (g, t) of warp w has c[4 n + i] of row
// 16 w + g + i / 2 * 8 of A and of row 8 n + 2 t + i % 2 of B.
template <int N, bool CODED>
struct Product;
#define PRODUCT_OF(N, CODED, KIND, TURNED, A, B, ADD)                                                                             \
    template <>                                                                                                                   \
    struct Product<N, CODED> {                                                                                                    \
        static ON_DEVICE void add_to(float (&c)[N / 2], const void* a, const void* b, bool add) {                                 \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N KIND                 \
                         " {" NUMBERS_##N "}, %" #A ", %" #B ", p, 1, 1" TURNED "; }"                                             \
                         : SUMS_##N : "l"(tile_at(a)), "l"(tile_at(b)), "r"(int(add)));                                           \
        }                                                                                                                         \
    };
#define PRODUCT(N, A, B, ADD)                                              \
    PRODUCT_OF(N, false, "k16.f32.bf16.bf16", ", 0, 0", A, B, ADD)         \
    PRODUCT_OF(N, true, "k32.f32.e4m3.e4m3", "", A, B, ADD)
PRODUCT(40, 20, 21, 22)
PRODUCT(48, 24, 25, 26)
PRODUCT(56, 28, 29, 30)
PRODUCT(64, 32, 33, 34)
PRODUCT(72, 36, 37, 38)
PRODUCT(80, 40, 41, 42)
PRODUCT(96, 48, 49, 50)
PRODUCT(104, 52, 53, 54)
PRODUCT(112, 56, 57, 58)
PRODUCT(128, 64, 65, 66)
PRODUCT(136, 68, 69, 70)
PRODUCT(144, 72, 73, 74)
PRODUCT(152, 76, 77, 78)
PRODUCT(160, 80, 81, 82)
PRODUCT(200, 100, 101, 102)
PRODUCT(208, 104, 105, 106)
#undef PRODUCT
#undef PRODUCT_OF

}  // namespace device
