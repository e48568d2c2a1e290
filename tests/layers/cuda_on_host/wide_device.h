// What wide_device.cuh adds to device.cuh, for the host: see device.h.
#pragma once

#include "device.h"

namespace device {

inline int cluster_id(int size) { return block_id() / size; }
inline int clusters(int size) { return int(host::grid->shared.size()) / size; }
inline void sync_warp() {}
inline void give_registers() {}
inline void take_registers() {}
inline void give_most_registers() {}
inline void take_most_registers() {}
inline float at(const float* p) { return *p; }
inline int64_t at(const int64_t* p) { return *p; }
inline float4 at4(const float* p) {
    if (reinterpret_cast<uintptr_t>(p) % 16) host::fail("four numbers are not aligned");
    return *reinterpret_cast<const float4*>(p);
}
inline void ask_for_map(const Map&) {}
template <int THREADS>
void sync_some() { host::meet(host::grid->all[block_id()], THREADS); }
inline void barrier_expect(Barrier* b, uint32_t bytes) { host::state_of(b).bytes += bytes; }

inline void copy_tile_to_many(void* to, const Map& map, const Place& place, Barrier* b, uint32_t mask) {
    for (int rank = 0; rank < host::grid->cluster; ++rank)
        if (mask >> rank & 1) copy_tile(at_rank(to, rank), map, place, reinterpret_cast<Barrier*>(at_rank(b, rank)));
}
inline void barrier_arrive_at(Remote barrier) { barrier_arrive(reinterpret_cast<Barrier*>(barrier)); }

inline float gated(float x, float y) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + std::exp(std::min(-2.0f * u, 80.0f))) * y;
}

inline float gated_for_codes(float x, float y) { return gated(x, y); }

inline uint32_t bits_from_lane(uint32_t x, int lane) { return bits_of(from_lane(as_float(x), lane)); }
inline uint32_t bits_from_lane_xor(uint32_t x, int mask) { return bits_of(from_lane_xor(as_float(x), mask)); }
// 8 x 8 numbers of 16 bits each: lane l has two of row l / 4, and row r of what is stored is column r, at the address of lane r.
inline void store_turned(void* to, const uint32_t* values, int count) {
    uint32_t in[6], out[1];
    const uint64_t at = reinterpret_cast<uint64_t>(to);
    in[0] = uint32_t(at), in[1] = uint32_t(at >> 32);
    for (int i = 0; i < count; ++i) in[2 + i] = values[i];
    if (at % 16) host::fail("a stored row is not aligned");
    host::together("a turned store", in, 2 + count, out, 0, [count](host::Warp& w) {
        for (int m = 0; m < count; ++m)
            for (int row = 0; row < 8; ++row) {
                const uint32_t* by = w.in[m * 8 + row];
                char* there = reinterpret_cast<char*>(uint64_t(by[0]) | uint64_t(by[1]) << 32);
                for (int l = 0; l < 8; ++l) std::memcpy(there + 2 * l, reinterpret_cast<const char*>(&w.in[l * 4 + row / 2][2 + m]) + row % 2 * 2, 2);
            }
    });
}
inline void store_turned(void* to, uint32_t a) { store_turned(to, &a, 1); }
inline void store_turned(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t all[4] = {a, b, c, d};
    store_turned(to, all, 4);
}

template <int N>
void multiply_coded(float* c, const void* a, const void* b, bool add) {
    const int lane = thread_id() % 32, warp = thread_id() / 32 % 4;
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) {
            float sum = add ? c[4 * n + i] : 0.0f;
            for (int k = 0; k < 32; ++k) sum += coded_in_tile(a, warp * 16 + lane / 4 + i / 2 * 8, k) * coded_in_tile(b, n * 8 + lane % 4 * 2 + i % 2, k);
            c[4 * n + i] = sum;
        }
}
template <int N, bool CODED>
struct Product {
    static void add_to(float (&c)[N / 2], const void* a, const void* b, bool add) {
        if (CODED) multiply_coded<N>(c, a, b, add);
        else multiply_tiles<N>(c, a, b, add);
    }
};

}  // namespace device
